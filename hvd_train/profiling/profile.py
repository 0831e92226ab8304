"""`--profile STEPS`: chosen steps as each rank and Horovod saw them, in one trace, and what they cost.

Whatever goes wrong with it ends the profile with a line, never the training.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from hvd_train.profiling import trace
from hvd_train.profiling.trace import Clock, Cost, Span
from hvd_train.progress.clock import Split, Stopwatch
from hvd_train.run_files import durable
from hvd_train.run_files.journal import Journal
from hvd_train.world.world import World, barrier

FOLDER = "profile"
_LOOKS = 8  # at one another's clocks
_BARRIER = ("allgather.hvd_train.gather.size", "allgather.hvd_train.gather")  # what Horovod sees of one of ours
_LOOK, _TIMELINE = "hvd_train.clock", "horovod.json"
_MOST_RANKS = 32  # their traces come together on rank 0


@dataclass(frozen=True)
class _Look:
    """A rank's kernel (one clock for all its processes), and when it came to some barriers and left them."""

    kernel: str
    moments: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Part:
    """What a rank has to give: its events, or why there are none, and how well its clock is known."""

    events: bytes = b""
    problem: str | None = None
    give_or_take: int = 0


class Profile:
    """Begins, on all ranks, before the first of its steps and ends after the last one.

    A change of world ends it, too: what rank 0 has of itself and of Horovod is kept then. It does not go on in the
    next world, where a newcomer knows nothing of it.
    """

    def __init__(
        self,
        steps: range,
        world: World,
        device: torch.device,
        journal: Journal,
        folder: Path | None,
        stopwatch: Stopwatch,
        split: Split,
    ) -> None:
        """`folder`: the run's, on the rank that has it."""
        self._wanted, self._world, self._device, self._journal = steps, world, device, journal
        self._folder, self._stopwatch, self._split = folder, stopwatch, split
        self._open: _Recording | None = None

    @contextmanager
    def within(self, step: int) -> Iterator[None]:
        """Training goes on inside this block, after `step`; where it ends early, the profile does."""
        try:
            if self._wanted and step >= self._wanted.start:
                self._say(f"nothing more is traced of {_named(self._wanted)}: step {step} is done already")
            self._begin_after(step)
            yield
            if self._open is not None:
                self._end(self._look(), "the training ended then")
        except BaseException as error:
            if self._open is not None:
                self._end(None, f"{type(error).__name__} broke it off")
            raise

    def passed(self, step: int) -> None:
        """A step is done, by all ranks."""
        if self._open is None:
            self._begin_after(step)
        else:
            self._open.passed(step)
            if step + 1 == self._wanted.stop:
                self._end(self._look())

    def _begin_after(self, step: int) -> None:
        if step + 1 != self._wanted.start or not self._wanted:
            return
        recording = self._open = _Recording(self._device)
        self._world.timeline(recording.timeline)
        recording.start()
        recording.looks = self._look()
        recording.watch(self._split)
        self._stopwatch.restart()

    def _end(self, looks: list[_Look] | None, why: str = "") -> None:
        """`looks`: at the ranks' clocks, once more; without them this rank is alone."""
        recording = self._open
        assert recording is not None
        recording.stop(self._split)
        self._world.timeline(None)
        place = self._world.place
        part = recording.part(place.rank, looks or recording.looks) if place.rank < _MOST_RANKS else _Part()
        parts = self._world.gather(part) if looks else [part]
        self._open = None
        if self._folder is not None:
            self._say(self._written(self._folder / FOLDER, recording, parts, why))
        recording.close()
        self._stopwatch.restart()
        self._split.restart()

    def _look(self) -> list[_Look]:
        """Of every rank, so that each can tell how far its clock is ahead of that of rank 0."""
        moments = []
        for _ in range(_LOOKS):
            came = time.time_ns()
            with record_function(_LOOK):
                barrier(self._world)
            moments.append((came, time.time_ns()))
        return self._world.gather(_Look(_kernel(), tuple(moments)))

    def _written(self, folder: Path, recording: _Recording, parts: list[_Part], why: str) -> str:
        """Write the trace; what there is to say of it."""
        problem = next((part.problem for part in parts if part.problem), None)
        if problem or not recording.steps:
            return f"no profile of {_named(self._wanted)}: {problem or why}; training goes on without it"
        numbers = [int(step.name.removeprefix("step ")) for step in recording.steps]
        steps = _named(range(numbers[0], numbers[-1] + 1))
        size = self._world.place.size
        ranks = [rank for rank, part in enumerate(parts) if part.events]
        clocks = f"clocks of ranks within {max(part.give_or_take for part in parts) / 1e6:.3f} ms of rank 0's"
        if recording.horovod:
            clocks += f", Horovod's within {recording.horovods_clock.give_or_take / 1e6:.3f} ms"
        events = [*[parts[rank].events for rank in ranks], trace.packed(recording.of_horovod(size + 1))]
        facts = {"steps": steps, "ranks": ranks, "world_size": size, "torch": torch.__version__, "clocks": clocks}
        path = folder / f"{steps.replace(' ', '-')}.json.gz"
        try:
            folder.mkdir(exist_ok=True)
            durable.write(path, trace.merged(events, facts | {"cut_short": why}))
        except OSError as error:
            return f"no profile of {steps}: cannot write {path}: {error.strerror}; training goes on without it"
        whose = f"{len(ranks)} of {size} ranks" if size > 1 else "1 rank"
        end = f" ({why})" if why else ""
        lines = [f"profile of {steps}{end}, on {whose}: {path}, to be opened at https://ui.perfetto.dev"]
        return "\n".join([*lines, *recording.summary(), f"  {clocks}"])

    def _say(self, message: str) -> None:
        self._journal.event("profile", message)


class _Recording:
    """What one rank records, from the first step to the last."""

    def __init__(self, device: torch.device) -> None:
        self.looks: list[_Look] = []
        self.steps: list[Span] = []
        self.horovod: list[Span] = []
        self.horovods_clock = trace.SAME
        self._phases: list[Span] = []
        self._costs: list[Cost] = []
        self._step_began = self._phase_began = self._zero = 0
        self._problem: str | None = None
        self._running = False
        self._folder: TemporaryDirectory[str] | None = None
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it tells of GPUs that are not there
        on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True)
        with self._not_fatal():
            self._folder = TemporaryDirectory(prefix="hvd-train-profile-")
            self._profiler.prepare_trace()

    @property
    def timeline(self) -> Path | None:
        """Where Horovod is to write."""
        return None if self._folder is None else Path(self._folder.name) / _TIMELINE

    def start(self) -> None:
        """From here on torch's operators are recorded."""
        with self._not_fatal():
            self._profiler.start_trace()
            self._running = True

    def watch(self, split: Split) -> None:
        """From here on it is steps that are recorded."""
        split.told = self._marked
        self._marked(None)

    def passed(self, step: int) -> None:
        """A step is done."""
        now = time.time_ns()
        self.steps.append(Span(f"step {step}", self._step_began, now, "steps"))
        self._step_began = now

    def stop(self, split: Split) -> None:
        """Nothing more is recorded."""
        split.told = None
        if self._running:
            self._running = False
            with self._not_fatal():
                self._profiler.stop_trace()

    def part(self, rank: int, looks: list[_Look]) -> _Part:
        """What this rank gives to the trace, and to rank 0 the times of Horovod's timeline."""
        part = _Part()
        with self._not_fatal():
            if self.steps and self._folder is not None:
                part = self._part(rank, looks, Path(self._folder.name))
        return _Part(problem=f"rank {rank}: {self._problem}") if self._problem else part

    def _part(self, rank: int, looks: list[_Look], folder: Path) -> _Part:
        clock, first, last = trace.SAME, self.steps[0].start, self.steps[-1].end
        if self.looks[rank].kernel != self.looks[0].kernel:
            mine, of_rank_0 = ((*self.looks[one].moments, *looks[one].moments) for one in (rank, 0))
            clock = trace.clock_of(mine, of_rank_0)
        path = folder / "torch.json"
        self._profiler.export_chrome_trace(str(path))
        spans = trace.read_torch(json.loads(path.read_bytes()))
        torchs = trace.clock_in([span for span in spans if span.name == _LOOK], self.looks[rank].moments)
        spans = _between(first, last, spans, torchs)
        of_steps = (span for span in spans if any(step.start <= span.start < step.end for step in self.steps))
        self._costs = trace.costs(list(of_steps))  # an evaluation may lie between them
        self._phases = [span for span in self._phases if span.end <= last]
        if (path := folder / _TIMELINE).exists():
            found = trace.read_horovod(json.loads(path.read_bytes()))
            halves = ([span for span in found if (span.track, span.name) == (half, "ALLGATHER")] for half in _BARRIER)
            barriers = [Span("barrier", size.start, rest.end) for size, rest in zip(*halves, strict=False)]
            self.horovods_clock = trace.clock_in(barriers, self.looks[0].moments)
            self.horovod = _between(first, last, found, self.horovods_clock)
        self._zero = self.looks[0].moments[-1][1]
        name = f"rank {rank} on {socket.gethostname()}"
        events = trace.process(rank + 1, name, [*self.steps, *self._phases, *spans], self._zero + clock.ahead)
        return _Part(trace.packed(events), give_or_take=clock.give_or_take + torchs.give_or_take)

    def of_horovod(self, pid: int) -> list[dict[str, Any]]:
        """Its events, as a process of their own."""
        return trace.process(pid, "Horovod, seen from rank 0", self.horovod, self._zero) if self.horovod else []

    def summary(self) -> list[str]:
        """Where the time went on this rank."""
        return trace.summary(self.steps, self._phases, self._costs, self.horovod)

    def close(self) -> None:
        """Remove what is no longer needed."""
        if self._folder is not None:
            with suppress(OSError):
                self._folder.cleanup()

    def _marked(self, phase: str | None) -> None:
        now = time.time_ns()
        if phase is None:
            self._step_began = now
        else:
            self._phases.append(Span(phase, self._phase_began, now, "phases"))
        self._phase_began = now

    @contextmanager
    def _not_fatal(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever a profiler raises, the training is worth more
            said = (str(error) or type(error).__name__).splitlines()[0]
            self._problem = self._problem or f"the profiler failed ({said})"


def _between(first: int, last: int, spans: list[Span], clock: Clock) -> list[Span]:
    """Those that are wholly within these times by the rank's clock; `clock`: theirs."""
    moved = (span.earlier(clock.ahead) for span in spans)
    return [span for span in moved if first <= span.start and span.end <= last]


def _named(steps: range) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
