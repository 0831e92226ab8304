"""The stacks that Python's faulthandler writes, as values: which threads a process has, and where each of them is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hvd_train.console import PROGRAM
from hvd_train.user_code import is_theirs

_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.+)$')


@dataclass(frozen=True)
class Frame:
    """A call that has not returned."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """File and line, as people write them."""
        return f"{Path(self.file).name}:{self.line}"


@dataclass(frozen=True)
class Thread:
    """A thread of a process, with its frames, the innermost first."""

    name: str
    frames: tuple[Frame, ...]
    has_signal: bool = False
    """Whether it was this one that the signal has come to: the first of a process, unless that one blocks it."""

    @property
    def their_frame(self) -> Frame | None:
        """The innermost frame in the user's own code."""
        theirs = (frame for frame in self.frames if is_theirs(frame.file) and Path(frame.file).name != PROGRAM)
        return next(theirs, None)

    @property
    def in_horovod(self) -> bool:
        """Whether it has called Horovod, and Horovod has not returned."""
        return bool(self.frames) and "horovod" in Path(self.frames[0].file).parts

    def calls(self, end_of_file: str) -> bool:
        """Return whether one of its frames is in a file whose path ends so."""
        return any(frame.file.endswith(end_of_file) for frame in self.frames)


def read(text: str) -> tuple[Thread, ...]:
    """Return the threads of which faulthandler has written the stacks; lines that it does not write are left out."""
    threads: list[Thread] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append(Thread(head[3] or head[2], (), has_signal=head[1].startswith("Current")))
        elif threads and (found := _FRAME.match(line)):
            frame = Frame(found[1], int(found[2]) if found[2].isdigit() else 0, found[3])
            last = threads[-1]
            threads[-1] = Thread(last.name, (*last.frames, frame), last.has_signal)
    return tuple(threads)


def main_thread(threads: tuple[Thread, ...]) -> Thread | None:
    """Return the thread that runs the program: it begins with a module; else the one that had the signal."""
    of_module = [thread for thread in threads if thread.frames and thread.frames[-1].function == "<module>"]
    return next(iter([*of_module, *(thread for thread in threads if thread.has_signal), *threads]), None)
