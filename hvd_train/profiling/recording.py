"""What one rank records of some steps: torch's operators, the phases of each step, and Horovod's timeline on rank 0.

A profiler that fails never ends the training: the first failure is kept and reported in place of the recording.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from hvd_train.profiling import trace
from hvd_train.profiling.clock_offsets import NO_OFFSET, BarrierTimes, offset_between, offset_of_spans
from hvd_train.profiling.summary import Cost, costs, summary
from hvd_train.profiling.trace import Span
from hvd_train.progress.clock import Split
from hvd_train.travel import may_travel
from hvd_train.world.world import World, barrier

_CLOCK_BARRIERS = 8  # each of them bounds the offsets between the ranks' clocks; the tightest bounds count
_BARRIER_MARK = "hvd_train.clock"  # the name of these barriers in torch's trace
_BARRIER_TENSORS = ("allgather.hvd_train.gather.size", "allgather.hvd_train.gather")  # and those in Horovod's timeline
_TIMELINE = "horovod.json"


@may_travel
@dataclass(frozen=True)
class ClockSample:
    """When a rank came to some barriers and left them, and which kernel kept the time: its processes share a clock."""

    kernel: str
    barriers: tuple[tuple[int, int], ...]


@may_travel
@dataclass(frozen=True)
class RankTrace:
    """What a rank contributes to the trace: its packed events, or why there are none."""

    events: bytes = b""
    problem: str | None = None
    uncertainty_ns: int = 0
    """How far its times may be off rank 0's clock."""


def sample_clocks(world: World) -> list[ClockSample]:
    """Let all ranks meet at some barriers; return the sample of each rank, by which their clocks can be compared.

    A collective operation. Raises RankLost.
    """
    barriers = []
    for _ in range(_CLOCK_BARRIERS):
        came = time.time_ns()
        with record_function(_BARRIER_MARK):
            barrier(world)
        barriers.append((came, time.time_ns()))
    return world.gather(ClockSample(_kernel(), tuple(barriers)))


class Recording:
    """Records on one rank, from the first of the wanted steps to the last one."""

    def __init__(self, device: torch.device) -> None:
        self.steps: list[Span] = []
        self.horovod: list[Span] = []
        self.horovods_clock = NO_OFFSET
        self.clocks: list[ClockSample] = []
        """The sample of each rank's clock at the beginning, from `sample_clocks`."""
        self._phases: list[Span] = []
        self._costs: list[Cost] = []
        self._step_began = self._phase_began = self._zero = 0
        self._problem: str | None = None
        self._running = False
        self._folder: TemporaryDirectory[str] | None = None
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines about GPUs that are not there
        on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True)
        with self._not_fatal():
            self._folder = TemporaryDirectory(prefix="hvd-train-profile-")
            self._profiler.prepare_trace()

    @property
    def timeline(self) -> Path | None:
        """Return the file that Horovod is to write its timeline into, or None where there is no folder for it."""
        return None if self._folder is None else Path(self._folder.name) / _TIMELINE

    def start(self) -> None:
        """Begin to record torch's operators."""
        with self._not_fatal():
            self._profiler.start_trace()
            self._running = True

    def start_steps(self, split: Split) -> None:
        """Begin to record steps and their phases, which `split` marks."""
        split.listener = self._mark
        self._mark(None)

    def step_done(self, step: int) -> None:
        """Record that the step of this number has just ended."""
        now = time.time_ns()
        self.steps.append(Span(f"step {step}", self._step_began, now, "steps"))
        self._step_began = now

    def stop(self, split: Split) -> None:
        """Stop recording."""
        split.listener = None
        if self._running:
            self._running = False
            with self._not_fatal():
                self._profiler.stop_trace()

    def rank_trace(self, rank: int, clocks_at_end: Sequence[ClockSample]) -> RankTrace:
        """Return what this rank contributes to the trace, with times by rank 0's clock."""
        contribution = RankTrace()
        with self._not_fatal():
            if self.steps and self._folder is not None:
                contribution = self._rank_trace(rank, clocks_at_end, Path(self._folder.name))
        return RankTrace(problem=f"rank {rank}: {self._problem}") if self._problem else contribution

    def _rank_trace(self, rank: int, clocks_at_end: Sequence[ClockSample], folder: Path) -> RankTrace:
        first, last = self.steps[0].start, self.steps[-1].end
        mine, of_rank_0 = self.clocks[rank], self.clocks[0]
        offset = NO_OFFSET
        if mine.kernel != of_rank_0.kernel:
            offset = offset_between(
                (*mine.barriers, *clocks_at_end[rank].barriers), (*of_rank_0.barriers, *clocks_at_end[0].barriers)
            )
        path = folder / "torch.json"
        self._profiler.export_chrome_trace(str(path))
        spans = trace.read_torch(json.loads(path.read_bytes()))
        torchs_clock = offset_of_spans([span for span in spans if span.name == _BARRIER_MARK], mine.barriers)
        spans = _between(first, last, spans, torchs_clock.ahead_ns)
        of_steps = [span for span in spans if any(step.start <= span.start < step.end for step in self.steps)]
        self._costs = costs(of_steps)  # without those of an evaluation between two steps
        self._phases = [span for span in self._phases if span.end <= last]
        self._zero = of_rank_0.barriers[-1][1]
        if (path := folder / _TIMELINE).exists():
            self._read_timeline(path, of_rank_0.barriers)
        name = f"rank {rank} on {socket.gethostname()}"
        events = trace.process(rank + 1, name, [*self.steps, *self._phases, *spans], self._zero + offset.ahead_ns)
        return RankTrace(trace.packed(events), uncertainty_ns=offset.uncertainty_ns + torchs_clock.uncertainty_ns)

    def _read_timeline(self, path: Path, barriers: BarrierTimes) -> None:
        """Take Horovod's activities during the steps; Horovod sees each of our barriers as two allgathers."""
        spans = trace.read_horovod(json.loads(path.read_bytes()))
        allgathers = (
            [span for span in spans if (span.track, span.name) == (tensor, "ALLGATHER")] for tensor in _BARRIER_TENSORS
        )
        seen = [Span("barrier", size.start, payload.end) for size, payload in zip(*allgathers, strict=False)]
        self.horovods_clock = offset_of_spans(seen, barriers)
        self.horovod = _between(self.steps[0].start, self.steps[-1].end, spans, self.horovods_clock.ahead_ns)

    def horovods_events(self, pid: int) -> list[dict[str, Any]]:
        """Return Horovod's events as a process of their own in the trace; empty where it has written no timeline."""
        return trace.process(pid, "Horovod, seen from rank 0", self.horovod, self._zero) if self.horovod else []

    def summary(self) -> list[str]:
        """Return the lines that say where the time went on this rank."""
        return summary(self.steps, self._phases, self._costs, self.horovod)

    def close(self) -> None:
        """Remove the temporary files."""
        if self._folder is not None:
            with suppress(OSError):
                self._folder.cleanup()

    def _mark(self, phase: str | None) -> None:
        """Note that a phase has just ended; with None, that the time until now was not training."""
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
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self._problem = self._problem or f"the profiler failed ({reason})"


def _between(first: int, last: int, spans: Sequence[Span], ahead_ns: int) -> list[Span]:
    """Return the spans that lie within two times of a rank, by its clock; `ahead_ns` is how far theirs is ahead."""
    moved = (span.earlier(ahead_ns) for span in spans)
    return [span for span in moved if first <= span.start and span.end <= last]


def _kernel() -> str:
    """Return what tells the running kernel from every other, so that processes with one clock can be recognised."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # psutil does not offer it
    except OSError:
        return socket.gethostname()
