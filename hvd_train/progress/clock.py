"""Time training: images per second, the phases of a step, and limits."""

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_GPU_SECONDS = 10.0  # from one look at the load of the GPU to the next
_WARMUP_STEPS = 5  # the first steps pay for allocation, tuning and Horovod's negotiation


Marks = list[tuple[str, Any, Any]]
PHASES = ("data", "forward", "backward", "reduction", "optimizer", "other")
"""The phases of a step; "data" is the wait for samples, "reduction" the wait for other
ranks."""
_MOST_UPDATES = 100  # of a GPU that are not added up yet


class Split:
    """Splits the time of steps into phases.

    A mark gives the time since the last mark to a phase.
    """

    def __init__(
        self,
        stamp: Callable[[], Any] = time.perf_counter,
        seconds: Callable[[Any, Any], float] = operator.sub,
    ) -> None:
        """`stamp()` returns a point in time, and `seconds(end, start)` the
        seconds between two of them.
        """
        self._stamp = stamp
        self._seconds = seconds
        # what lives for several steps makes Python look for garbage more often
        self._most_updates = 0 if stamp is time.perf_counter else _MOST_UPDATES
        self._last = stamp()
        self.forget()

    def forget(self) -> None:
        """Forget all marks so far."""
        self._marks: Marks = []  # since the last update
        # of updates, with the sizes of micro-batches; read late: a GPU works asynchronously
        self._ended = list[tuple[Marks, Sequence[int]]]()
        self._sums = dict.fromkeys(("updates", "samples", "micro-batches", *PHASES), 0.0)
        self._at_call = {call: [*self._sums.values()] for call in ("take", "times")}

    def mark(self, phase: str) -> None:
        """Give the time since the last mark to one of PHASES."""
        now = self._stamp()
        self._marks.append((phase, now, self._last))
        self._last = now

    def end_update(self, micro_batches: Sequence[int]) -> None:
        """End an update of micro-batches of these sizes. The host has waited for its sums,
        so a GPU is through with the updates before.
        """
        self.mark("optimizer")
        self._ended.append((self._marks, micro_batches))
        self._marks = []
        if len(self._ended) > self._most_updates:
            self._add_up(max(1, self._most_updates))

    def restart(self) -> None:
        """Leave out the time since the last mark."""
        self._last = self._stamp()

    def take(self) -> dict[str, float] | None:
        """Return the mean seconds of each phase in the updates since the last call.

        None without updates. A GPU finishes the last one first.
        """
        self._add_up(len(self._ended))
        updates, _, _, *seconds = self._since_last("take")
        return {p: s / updates for p, s in zip(PHASES, seconds, strict=True)} if updates else None

    def times(self) -> list[float]:
        """Return the updates since the last call that a GPU is through with, their samples
        and micro-batches on this rank, and the seconds of each phase.
        """
        self._add_up(len(self._ended) - 1)
        return self._since_last("times")

    def _since_last(self, call: str) -> list[float]:
        before = self._at_call[call]
        self._at_call[call] = [*self._sums.values()]
        return [now - then for now, then in zip(self._at_call[call], before, strict=True)]

    def _add_up(self, updates: int) -> None:
        sums = self._sums
        for marks, micro_batches in self._ended[: max(0, updates)]:
            for phase, end, start in marks:
                # not in place: `benchmarks.gpu_counts` adds arrays up
                sums[phase] = sums[phase] + self._seconds(end, start)
            sums["updates"] += 1
            sums["samples"] += sum(micro_batches)
            sums["micro-batches"] += len(micro_batches)
        del self._ended[: max(0, updates)]


class Timer:
    """Becomes due some seconds after its creation or last reset; never, if `seconds` is None."""

    def __init__(self, seconds: float | None, now: Callable[[], float]) -> None:
        self._limit = seconds
        self._now = now
        self.reset()

    @property
    def due(self) -> bool:
        """Whether the limit has been reached."""
        return self._limit is not None and self._now() - self._start >= self._limit

    def comes(self) -> bool:
        """Return whether it is due, and restart the count then."""
        is_due = self.due
        if is_due:
            self.reset()
        return is_due

    def reset(self) -> None:
        """Restart the count."""
        self._start = self._now()


class TrainingClock:
    """Times a training: its speed, the phases of its steps, its seconds over all resumes,
    and what is due.

    The speed leaves out start-up, evaluations, rendezvous and final writes.
    """

    def __init__(
        self,
        commit_seconds: float | None,
        split: Split,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.split = split
        self.commits = Timer(commit_seconds, now)
        self.gpu_looks = Timer(_GPU_SECONDS, now)
        self._now = now
        self._start = now()
        self._begin = self._start  # of the whole training, had it never paused
        self._mark = self._start
        self._skip = _WARMUP_STEPS
        self._samples = 0
        self._counted = 0.0  # seconds, for the speed

    def join(self, before: float) -> None:
        """Begin to train, after `before` seconds of the run."""
        self._begin = self._now() - before

    def enter_world(self) -> None:
        """Leave out the time until now, and the phases of a step that is interrupted."""
        self.restart()
        self.split.forget()

    def step(self, num_samples: int) -> None:
        """Count a step that has just ended, and its samples on all ranks."""
        now = self._now()
        if self._skip:
            self._skip -= 1
        else:
            self._samples += num_samples
            self._counted = self._counted + now - self._mark
        self._mark = now

    def restart(self) -> None:
        """Leave out the time since the last step."""
        self._mark = self._now()
        self.split.restart()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time inside this block."""
        self._counted += 0.0 if self._skip else self._now() - self._mark
        yield
        self.restart()

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second of training; 0 before the first counted step."""
        return self._samples / self._counted if self._counted else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of training of the run so far."""
        return self._now() - self._begin

    @property
    def of_process(self) -> float:
        """Seconds since this training was built."""
        return self._now() - self._start


def duration(seconds: float) -> str:
    """Format a number of seconds: `1.5 s`, `3:20` or `2:05:00`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
