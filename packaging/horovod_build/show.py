"""What the user sees: lines with what was done, the progress of the compilation, the first errors of a log."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

PROGRESS_EVERY_S = 15.0


def say(line: str) -> None:
    """One line to the user."""
    print(f"horovod: {line}", flush=True)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what was done and how long it took."""
    start = time.monotonic()
    yield
    say(f"{what} ({time.monotonic() - start:.1f} s)")


class Progress:
    """How far the compilation is: one live line on a terminal, otherwise a line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty()
        self.start = time.monotonic()
        self.percent = 0
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._show_in_time, daemon=True)

    def __enter__(self) -> Progress:
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._clock.join()
        if self.live:
            print("\r\x1b[K", end="", file=self.stream, flush=True)

    def feed(self, line: str) -> None:
        """Take one line of make's output."""
        if match := re.search(r"\[ *(\d+)%\]", line):
            self.percent = max(self.percent, int(match.group(1)))

    def show(self) -> None:
        """Print how far it is."""
        text = f"horovod: compiling {self.percent}% ({time.monotonic() - self.start:.0f} s)"
        print(f"\r{text}" if self.live else text, end="" if self.live else "\n", file=self.stream, flush=True)

    def _show_in_time(self) -> None:
        # A clock of its own: one file can take longer than a line may be late.
        while not self._ended.wait(1.0 if self.live else PROGRESS_EVERY_S):
            self.show()


def first_errors(log: Path, limit: int = 4) -> list[str]:
    """The lines of a log that say what went wrong, without what follows from them."""
    signs = re.compile(r"error:|CMake Error|undefined reference|No space left|Killed|ERROR:|cannot find -l")
    noise = re.compile(r"Failed building wheel|subprocess-exited-with-error|returned non-zero|metadata-generation")
    found = []
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if signs.search(line) and not noise.search(line) and line.strip() not in found:
                found.append(line.strip())
    return [line[:200] for line in found[:limit]]
