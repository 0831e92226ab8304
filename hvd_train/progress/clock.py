"""Honest timing: images per second of training alone, and where the time of a step goes."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


PHASES = ("data", "forward", "backward", "reduction", "optimizer", "other")
"""Of a step: the wait for samples, the passes, the wait for other ranks' gradients after them, the update, the rest."""
_MOST_MARKS = 600


class Split:
    """Where the time of training steps goes. Each mark gives what has passed since the last one to a phase.

    A GPU works later than it is asked to: there a stamp is an event in its queue (see `device.split_on`).
    """

    def __init__(
        self, stamp: Callable[[], Any] = time.perf_counter, seconds: Callable[[Any, Any], float] = operator.sub
    ) -> None:
        """`seconds(end, start)`: between two stamps."""
        self._stamp, self._seconds = stamp, seconds
        self._marks: list[tuple[str, Any, Any]] = []
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._steps = 0
        self._last = stamp()
        self.told: Callable[[str | None], None] | None = None
        """Is told of each mark as it is made, and by None of what was not training: a profile's."""

    def mark(self, phase: str) -> None:
        """What has happened since the last mark was this."""
        now = self._stamp()
        if self.told is not None:
            self.told(phase)
        self._marks.append((phase, now, self._last))
        self._last = now
        if len(self._marks) >= _MOST_MARKS:
            self._add_up()

    def restart(self) -> None:
        """What has happened since the last mark was not training."""
        self._last = self._stamp()
        if self.told is not None:
            self.told(None)

    def take(self) -> dict[str, float] | None:
        """Seconds of each phase, mean of the steps since this was last asked; None without any."""
        self._add_up()
        spent, steps = self._spent, self._steps
        self._spent, self._steps = dict.fromkeys(PHASES, 0.0), 0
        return {phase: seconds / steps for phase, seconds in spent.items()} if steps else None

    def _add_up(self) -> None:
        for phase, end, start in self._marks:
            self._spent[phase] += self._seconds(end, start)
            self._steps += phase == "data"
        self._marks.clear()


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
