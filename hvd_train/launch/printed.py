"""What a rank has printed last, as its launcher sees it go by: a few lines, its error, where it crashed. No torch."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar, TextIO

from hvd_train import user_code
from hvd_train.console import PROGRAM, printable

_LAST_LINES, _LAST_FRAMES, _LONGEST_LINE = 2, 100, 300
# What launchers put before a line: Open MPI 5, horovodrun and Open MPI 4, MPICH. Open MPI breaks long lines with it.
_TAG = re.compile(r"\[[^\]\s]*@[\d,]+\](?:<std\w+>)?: |\[(?:\d+,)?\d+\]<std\w+>:|\[\d+\] ")
_LOG = re.compile(r"\[\d{4}-\d\d-\d\d[^\]]*\.cc:\d+\]")  # of Horovod's native code
_ERROR = f"{PROGRAM}: "
_GOES_ON = "the same command goes on"
# What Python's faulthandler prints where a signal ends the process; Python 3.14 has the frames of native code, too.
_CRASH = "Fatal Python error: "
_OF_CRASH = re.compile(r"Stack \(|Thread 0x|Current thread|Extension modules: |  File |  Binary file |  <|  \.\.\.")
_FRAME = re.compile(r'  File "(.+)", line (\d+),? in (.+)')


class Printed:
    """Takes the lines that one rank prints, and keeps a few of them, whatever it prints and however much."""

    _lines_of_all: ClassVar[int] = 0

    def __init__(self) -> None:
        self.error = ""
        """The line that names the error of its last traceback; empty where there was none."""
        self.told = False
        """Whether its last lines are an error as hvd_train tells it."""
        self.goes_on = False
        """Whether it has said that the same command goes on."""
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._number = 0
        self._in_traceback = False
        self._crash: list[str] | None = None

    def take(self, text: str) -> None:
        """Take a line, with or without its end and the launcher's tag in front of it."""
        tag = _TAG.match(text)
        line = printable((text.replace(tag[0], "") if tag else text)[:_LONGEST_LINE].rstrip())
        if not line:
            return
        self._number = Printed._lines_of_all = Printed._lines_of_all + 1
        if line.startswith(_CRASH):
            self._crash = []
        elif self._crash is not None and _OF_CRASH.match(line):
            if len(self._crash) < _LAST_FRAMES:
                self._crash.append(line)
        elif "Traceback (most recent call last)" in line:
            self._in_traceback = True
            self.told = self.told or line.startswith(_ERROR)
        elif self._in_traceback:
            if not line.startswith(" "):
                self._in_traceback, self.error = False, line
        elif line.startswith(_ERROR):
            self.told = True
            self.goes_on = self.goes_on or _GOES_ON in text
        elif not _LOG.match(line):
            self.told = False
            self._last.append(line)

    @property
    def last(self) -> tuple[str, ...]:
        """Its last lines, without tracebacks and what hvd_train and Horovod have told."""
        return tuple(self._last)

    @property
    def crashed_at(self) -> str:
        """Where a signal has ended it, as in `mine.py, line 5, in forward (through conv2d)`; empty where it told none.

        That is the last frame of the user's files, or of any where there is none, and the last function of all.
        """
        frames = [match.groups() for match in map(_FRAME.match, self._crash or []) if match]
        if not frames:
            return ""
        file, line, name = next((frame for frame in frames if user_code.is_theirs(frame[0])), frames[0])
        last = frames[0][2]
        return f"{file}, line {line}, in {name}" + ("" if last == name else f" (through {last})")

    def came_last(self) -> bool:
        """Return whether no other rank has printed anything since: all of it is right above what is printed next."""
        return self._number == Printed._lines_of_all


_current: ContextVar[Printed | None] = ContextVar("printed", default=None)


@contextmanager
def kept() -> Iterator[Printed]:
    """Keep what a rank prints that is started, and followed to its end, by this thread inside the block."""
    printed = Printed()
    token = _current.set(printed)
    try:
        yield printed
    finally:
        _current.reset(token)


def current() -> Printed:
    """Return what keeps the lines of the rank that this thread is about to start (`kept`), or a new one."""
    return _current.get() or Printed()


class Shown:
    """A text stream that shows what it is given on another one, and lets a `Printed` take it."""

    def __init__(self, stream: TextIO, printed: Printed) -> None:
        self._stream, self._printed = stream, printed

    def write(self, text: str) -> int:
        """Write a line of the rank."""
        self._printed.take(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream behind."""
        self._stream.flush()


def shown(stdout: TextIO | None, stderr: TextIO | None, printed: Printed) -> tuple[Shown, Shown]:
    """Return both streams of a rank, or those of this process in their place, with `printed` taking what they show."""
    return Shown(stdout or sys.stdout, printed), Shown(stderr or sys.stderr, printed)
