"""Honest timing: images per second of training alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WARMUP_STEPS = 5  # the first steps pay for allocation, tuning and the first exchange of names between ranks


class Stopwatch:
    """Counts samples and the seconds spent on them; start-up, evaluations and final writes are not among them."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._mark = now()
        self._skip = _WARMUP_STEPS
        self.samples, self.seconds = 0, 0.0

    def step(self, num_samples: int) -> None:
        """A step with so many samples (of all ranks) has just ended."""
        now = self._now()
        if self._skip:
            self._skip -= 1
        else:
            self.samples, self.seconds = self.samples + num_samples, self.seconds + now - self._mark
        self._mark = now

    def restart(self) -> None:
        """What has happened since the last step was not training."""
        self._mark = self._now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside this block is not training."""
        self.seconds += 0.0 if self._skip else self._now() - self._mark
        yield
        self._mark = self._now()

    @property
    def images_per_second(self) -> float:
        """Samples of all ranks per second of training; 0 before there is anything to go by."""
        return self.samples / self.seconds if self.seconds else 0.0


class Timer:
    """Says when so many seconds have passed since it was last reset; never, where there is no limit."""

    def __init__(
        self, seconds: float | None, now: Callable[[], float] = time.monotonic, *, passed: float = 0.0
    ) -> None:
        """`passed`: so many of the seconds are over already."""
        self._limit, self._now, self._start = seconds, now, now() - passed

    @property
    def due(self) -> bool:
        """Whether the time has come."""
        return self._limit is not None and self._now() - self._start >= self._limit

    def reset(self) -> None:
        """Start again."""
        self._start = self._now()


def duration(seconds: float) -> str:
    """Seconds as people say them: 1.5 s, 3:20, 2:05:00."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds else "0"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
