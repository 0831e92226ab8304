"""Show a line for each step, the progress of compiling, and the first errors in a log."""

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
    """Print a line at once, with the prefix of this program."""
    print(f"horovod: {line}", flush=True)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Print what the block did and how long it took, unless it raises."""
    start = time.monotonic()
    yield
    say(f"{what} ({time.monotonic() - start:.1f} s)")


class Progress:
    """Show how far the compilation is: in one live line on a terminal, else in a line every 15 s."""

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
        """Read the percentage from a line of make's output, if it has one."""
        if match := re.search(r"\[ *(\d+)%\]", line):
            self.percent = max(self.percent, int(match.group(1)))

    def show(self) -> None:
        """Print how far the compilation is."""
        text = f"horovod: compiling {self.percent}% ({time.monotonic() - self.start:.0f} s)"
        print(f"\r{text}" if self.live else text, end="" if self.live else "\n", file=self.stream, flush=True)

    def _show_in_time(self) -> None:
        # By the clock, not by make's output: a single file can take longer than the time between two lines.
        while not self._ended.wait(1.0 if self.live else PROGRESS_EVERY_S):
            self.show()


def first_errors(log: Path, limit: int = 4) -> list[str]:
    """Return up to `limit` different lines of a log that report errors, without mere consequences."""
    signs = re.compile(r"error:|CMake Error|undefined reference|No space left|Killed|ERROR:|cannot find -l")
    noise = re.compile(r"Failed building wheel|subprocess-exited-with-error|returned non-zero|metadata-generation")
    found = []
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if signs.search(line) and not noise.search(line) and line.strip() not in found:
                found.append(line.strip())
    return [line[:200] for line in found[:limit]]
