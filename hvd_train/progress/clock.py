"""Honest timing: images per second of training alone, and where the time of a step goes."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvd_train.progress.whereabouts import here

_WARMUP_STEPS = 5  # the first steps pay for allocation, tuning and the first exchange of names between ranks


class Stopwatch:
    """Counts samples and the seconds spent on them; start-up, evaluations and final writes are not among them."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._mark = now()
        self._skip = _WARMUP_STEPS
        self.samples, self.seconds = 0, 0.0

    def step(self, num_samples: int) -> None:
        """Count a step that has just ended, with its number of samples over all ranks."""
        now = self._now()
        if self._skip:
            self._skip -= 1
        else:
            self.samples, self.seconds = self.samples + num_samples, self.seconds + now - self._mark
        self._mark = now

    def restart(self) -> None:
        """Leave out the time since the last step, which was not training."""
        self._mark = self._now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside this block, which is not training."""
        self.seconds += 0.0 if self._skip else self._now() - self._mark
        yield
        self._mark = self._now()

    @property
    def images_per_second(self) -> float:
        """Samples of all ranks per second of training; 0 before a step has been counted."""
        return self.samples / self.seconds if self.seconds else 0.0


PHASES = ("data", "forward", "backward", "reduction", "optimizer", "commit", "other")
"""The phases of a step: the wait for samples, the forward and the backward passes, the wait for other ranks' gradients
after them, the update of the weights, what a commit takes of the time between two steps, and the rest."""
WORK = "work"
"""What all phases but the reduction are together: what a rank does without waiting for others."""
_MOST_MARKS = 600


class Split:
    """Splits the time of training steps into phases: each mark gives the time since the mark before it to a phase.

    A GPU works later than it is asked to. There a stamp is an event in the GPU's queue (see `network.device.split_on`),
    and stamps are turned into seconds only when the sums are needed.
    """

    def __init__(
        self, stamp: Callable[[], Any] = time.perf_counter, seconds: Callable[[Any, Any], float] = operator.sub
    ) -> None:
        """`stamp()` returns a point in time, and `seconds(end, start)` the seconds between two of them."""
        self._stamp, self._seconds = stamp, seconds
        self._marks: list[tuple[str, Any, Any]] = []
        self._spent, self._spent_before = _Sums(), _Sums()
        self._last = stamp()
        self.listener: Callable[[str | None], None] | None = None
        """Called at each mark with its phase, and at each restart with None; this is how a profile sees the phases."""

    def mark(self, phase: str) -> None:
        """Give the time since the last mark to one of PHASES."""
        now = self._stamp()
        here.after(phase)
        if self.listener is not None:
            self.listener(phase)
        self._marks.append((phase, now, self._last))
        self._last = now
        if len(self._marks) >= _MOST_MARKS:
            self._add_up(len(self._marks))

    def restart(self) -> None:
        """Leave out the time since the last mark, which was not training."""
        self._last = self._stamp()
        if self.listener is not None:
            self.listener(None)

    def take(self) -> dict[str, float] | None:
        """Return the mean seconds of each phase over the steps since the last call; None where there were no steps."""
        self._add_up(len(self._marks))
        spent, self._spent = self._spent, _Sums()
        return spent.means()

    def take_until_reduction(self) -> dict[str, float] | None:
        """Return the same since the last call of this, until the end of the last reduction: for that no host waits.

        After it the host has read what the ranks have summed, so each event of a GPU before it is over.
        """
        reductions = (number for number in range(len(self._marks), 0, -1) if self._marks[number - 1][0] == "reduction")
        self._add_up(next(reductions, 0))
        spent, self._spent_before = self._spent_before, _Sums()
        return spent.means()

    def _add_up(self, num_marks: int) -> None:
        new = [(phase, self._seconds(end, start)) for phase, end, start in self._marks[:num_marks]]
        del self._marks[:num_marks]
        self._spent.add(new)
        self._spent_before.add(new)


class _Sums:
    """Seconds of each phase, over a number of steps."""

    def __init__(self) -> None:
        self._spent, self._steps = dict.fromkeys(PHASES, 0.0), 0

    def add(self, spent: Sequence[tuple[str, float]]) -> None:
        """Add seconds, each given with its phase."""
        for phase, seconds in spent:
            self._spent[phase] += seconds
            self._steps += phase == "optimizer"  # once in each step; samples are asked for once more in each epoch

    def means(self) -> dict[str, float] | None:
        """Return the mean of each phase; None where there were no steps."""
        return {phase: seconds / self._steps for phase, seconds in self._spent.items()} if self._steps else None


class Lap:
    """Measures the seconds from one question to the next."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._mark = now, now()

    def look(self) -> float:
        """Return the seconds since the last `take`, or since this was made."""
        return self._now() - self._mark

    def take(self) -> float:
        """Return them, and begin anew."""
        before, self._mark = self._mark, self._now()
        return self._mark - before


class Timer:
    """Becomes due when its seconds have passed since it was made or last reset; a timer without a limit never is."""

    def __init__(
        self, seconds: float | None, now: Callable[[], float] = time.monotonic, *, passed: float = 0.0
    ) -> None:
        """`passed` seconds of the limit are over already when the timer is made."""
        self._limit, self._now, self._start = seconds, now, now() - passed

    @property
    def due(self) -> bool:
        """Whether the limit has been reached."""
        return self._limit is not None and self._now() - self._start >= self._limit

    def reset(self, at_least: float = 0.0) -> None:
        """Start counting anew; it is not due before `at_least` seconds have passed."""
        self._start = self._now() + max(0.0, at_least - (self._limit or 0.0))


def duration(seconds: float) -> str:
    """Write a number of seconds as people do: `1.5 s`, `3:20` or `2:05:00`."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds else "0"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
