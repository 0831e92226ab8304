"""Profile chosen steps on all ranks (`--profile STEPS`): write a trace and a summary."""

from __future__ import annotations

import gzip
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from hvd_train.progress.clock import Split, Stopwatch
from hvd_train.run_files import durable
from hvd_train.run_files.journal import Journal
from hvd_train.world.world import World

Event = dict[str, Any]
_OF_THE_PROFILER = {"Trace", "overhead"}  # torch's categories of events about its profiler
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_NUM_COSTS = 10


class Span(NamedTuple):
    """An activity from its start to its end, in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    track: str = ""  # a thread, a stream of a GPU, or for Horovod a tensor


def _of_torch(document: Mapping[str, Any], first: int, last: int) -> list[Span]:
    """Return the spans between two times (nanoseconds since 1970) in torch's trace."""
    base, events = document["baseTimeNanoseconds"], document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = []
    for event in events:
        if event["ph"] == "X" and event.get("cat") not in _OF_THE_PROFILER:
            start = base + round(event["ts"] * 1000)
            track = names.get((event["pid"], event["tid"]), f"thread {event['tid']}").strip()
            track = f"GPU {event['pid']} {track}" if event.get("cat") in _ON_GPU else track
            spans.append(Span(event["name"], start, start + round(event["dur"] * 1000), track))
    return [span for span in spans if first <= span.start and span.end <= last]


def _of_horovod(events: Sequence[Mapping[str, Any]], first: int, last: int) -> list[Span]:
    spans: list[Span] = []
    tensors: dict[int, str] = {}
    begun: dict[int, list[tuple[str, int]]] = {}
    base = 0
    for event in events:
        phase, pid = event["ph"], event.get("pid", 0)
        if phase == "M":
            base = event["args"].get("start_time_since_epoch_in_micros", base)
            tensors[pid] = event["args"].get("name", tensors.get(pid, ""))
        elif phase == "B":
            begun.setdefault(pid, []).append((event["name"], event["ts"]))
        elif phase == "E" and begun.get(pid):
            name, start = begun[pid].pop()
            spans.append(Span(name, 1000 * (base + start), 1000 * (base + event["ts"]), tensors[pid]))
    return [span for span in spans if first <= span.start and span.end <= last]


def _process(pid: int, name: str, spans: Iterable[Span], zero: int) -> list[Event]:
    """Return a process's events, in microseconds since `zero`, with a thread a track."""
    events = [_metadata(pid, 0, "process_name", name=name), _metadata(pid, 0, "process_sort_index", sort_index=pid)]
    tids: dict[str, int] = {}
    for span in spans:
        if span.track not in tids:
            tid = tids[span.track] = len(tids) + 1
            events.append(_metadata(pid, tid, "thread_name", name=span.track))
            events.append(_metadata(pid, tid, "thread_sort_index", sort_index=tid))
        times = {"ts": (span.start - zero) / 1000, "dur": (span.end - span.start) / 1000}
        events.append({"ph": "X", "cat": "hvd_train", "name": span.name, "pid": pid, "tid": tids[span.track], **times})
    return events if tids else []


def _metadata(pid: int, tid: int, kind: str, **values: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": values}


def _packed(events: Sequence[Event]) -> bytes:
    return gzip.compress(json.dumps(events, separators=(",", ":")).encode()[1:-1], 5)


def _merged(parts: Iterable[bytes], facts: Mapping[str, Any]) -> bytes:
    events = b",\n".join(filter(None, map(gzip.decompress, parts)))
    properties = json.dumps({"displayTimeUnit": "ms", "otherData": facts}).encode()[1:-1]
    return gzip.compress(b'{"traceEvents":[\n' + events + b"],\n" + properties + b"}", 5)


def _named(steps: range) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def summary(steps: Sequence[Span], phases: Sequence[Span], costs: Sequence[tuple[str, float, int]]) -> list[str]:
    """Return the lines for the user. `costs` are operators or kernels: name, own microseconds, number of calls."""
    total = sum(step.end - step.start for step in steps)
    lines = [f"  {'phase':<44} {'ms a step':>10} {'share':>6}"]
    for name in dict.fromkeys(span.name for span in phases):
        spent = sum(span.end - span.start for span in phases if span.name == name)
        lines.append(f"  {name:<44} {spent / 1e6 / len(steps):10.2f} {spent / total:6.1%}")
    lines.append(f"  {f'the {_NUM_COSTS} largest costs':<44} {'total ms':>10} {'share':>6} {'calls':>7}")
    for name, microseconds, calls in sorted(costs, key=lambda cost: -cost[1])[:_NUM_COSTS]:
        lines.append(f"  {name[:44]:<44} {microseconds / 1e3:10.2f} {microseconds * 1e3 / total:6.1%} {calls:7}")
    return lines


FOLDER = "profile"
_MOST_RANKS = 32  # rank 0 holds all traces in memory


class Profile:
    """Records the chosen steps. An error of the profiler or a change of world ends only the profile."""

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
        """`steps` may be empty; `folder` is the run folder on the rank that writes it, None on other ranks."""
        self._wanted, self._world, self._device, self._journal = steps, world, device, journal
        self._folder, self._stopwatch, self._split = folder, stopwatch, split
        self._recording: _Recording | None = None

    def end(self, reason: str, *, alone: bool) -> None:
        """End a running profile; `alone` if other ranks may be lost."""
        if self._recording is not None:
            self._end(self._recording, reason, alone=alone)

    def step_done(self, step: int) -> None:
        """Record that all ranks have done this step. Raises RankLost if the profile begins or ends with it."""
        if self._recording is None:
            self.begin_after(step)
        else:
            self._recording.step_done(step)
            if step + 1 == self._wanted.stop:
                self._end(self._recording)

    def begin_after(self, step: int) -> None:
        """Begin if the next step is the first to be recorded. Raises RankLost."""
        if self._wanted and step + 1 == self._wanted.start:
            self._recording = _Recording(self._device, self._world, self._world.broadcast(time.time_ns(), 0))
            self._recording.begin(self._split)
            self._stopwatch.restart()

    def _end(self, recording: _Recording, reason: str = "", *, alone: bool = False) -> None:
        """Stop recording and write the trace; `alone` writes only this rank's, if another rank may be lost."""
        recording.stop(self._split)
        rank, size = self._world.place.rank, self._world.place.size
        own = recording.contribution(rank) if rank < _MOST_RANKS else (b"", None)
        traces = [own] if alone else self._world.gather(own)
        self._recording = None
        if self._folder is not None:
            message = self._written(self._folder / FOLDER, recording, traces, size, reason)
            self._journal.event("profile", message)
        recording.close()
        self._stopwatch.restart()
        self._split.restart()

    def _written(
        self, folder: Path, recording: _Recording, traces: Sequence[tuple[bytes, str | None]], size: int, reason: str
    ) -> str:
        """Write the trace, and return the message for the user."""
        problem = next((problem for _, problem in traces if problem), None)
        if problem or not recording.steps:
            return f"no profile of {_named(self._wanted)}: {problem or reason}; training continues without it"
        numbers = [int(step.name.removeprefix("step ")) for step in recording.steps]
        steps = _named(range(numbers[0], numbers[-1] + 1))
        ranks = [rank for rank, (events, _) in enumerate(traces) if events]
        horovod = _process(size + 1, "Horovod, seen from rank 0", recording.horovod, recording.begun)
        facts = {"steps": steps, "ranks": ranks, "world_size": size, "torch": torch.__version__, "cut_short": reason}
        path = folder / f"{steps.replace(' ', '-')}.json.gz"
        try:
            folder.mkdir(exist_ok=True)
            durable.write(path, _merged([*(traces[rank][0] for rank in ranks), _packed(horovod)], facts))
        except OSError as error:
            return f"no profile of {steps}: cannot write {path}: {error.strerror}; training continues without it"
        of_ranks = f"{len(ranks)} of {size} ranks" if size > 1 else "1 rank"
        end = f" ({reason})" if reason else ""
        first_line = f"profile of {steps}{end}, on {of_ranks}: {path} (open it at https://ui.perfetto.dev)"
        return "\n".join([first_line, *summary(recording.steps, recording.phases, recording.costs)])


class _Recording:
    """What one rank records: torch's operators, steps and their phases, and Horovod's timeline on rank 0."""

    def __init__(self, device: torch.device, world: World, begun: int) -> None:
        """The trace begins at `begun`, in nanoseconds since 1970."""
        self.steps, self.phases, self.horovod = list[Span](), list[Span](), list[Span]()
        self.costs: list[tuple[str, float, int]] = []
        self.begun, self._device, self._world = begun, device, world
        self._step_began = self._phase_began = 0
        self._problem: str | None = None
        self._folder: TemporaryDirectory[str] | None = None
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines about missing GPUs
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler = torch.profiler.profile(activities=kinds, acc_events=True)

    def begin(self, split: Split) -> None:
        with self._not_fatal():
            self._folder = TemporaryDirectory(prefix="hvd-train-profile-")
        self._world.timeline(self._horovods_file)
        with self._not_fatal():
            self._profiler.start()
        split.listener = self._mark
        self._mark(None)

    def step_done(self, step: int) -> None:
        now = time.time_ns()
        self.steps.append(Span(f"step {step}", self._step_began, now, "steps"))
        self._step_began = now

    def stop(self, split: Split) -> None:
        split.listener = None
        with self._not_fatal():
            self._profiler.stop()
        self._world.timeline(None)

    def contribution(self, rank: int) -> tuple[bytes, str | None]:
        """Return this rank's packed events, or what failed."""
        events = b""
        with self._not_fatal():
            if self.steps and self._folder is not None:
                events = _packed(self._events(rank, Path(self._folder.name) / "torch.json"))
        return (b"", f"rank {rank}: {self._problem}") if self._problem else (events, None)

    def close(self) -> None:
        if self._folder is not None:
            with suppress(OSError):
                self._folder.cleanup()

    def _events(self, rank: int, path: Path) -> list[Event]:
        first, last = self.steps[0].start, self.steps[-1].end
        self._profiler.export_chrome_trace(str(path))
        operators = _of_torch(json.loads(path.read_bytes()), first, last)
        kind = "CUDA" if self._device.type == "cuda" else "CPU"
        self.costs = [
            (cost.key, cost.self_device_time_total if kind == "CUDA" else cost.self_cpu_time_total, cost.count)
            for cost in self._profiler.key_averages()
            if cost.device_type.name == kind
        ]
        self.phases = [span for span in self.phases if span.end <= last]
        file = self._horovods_file
        if file is not None and file.exists():
            self.horovod = _of_horovod(json.loads(file.read_bytes()), first, last)
        spans = [*self.steps, *self.phases, *operators]
        return _process(rank + 1, f"rank {rank} on {socket.gethostname()}", spans, self.begun)

    @property
    def _horovods_file(self) -> Path | None:
        return None if self._folder is None else Path(self._folder.name) / "horovod.json"

    def _mark(self, phase: str | None) -> None:
        now = time.time_ns()
        if phase is None:
            self._step_began = now
        else:
            self.phases.append(Span(phase, self._phase_began, now, "phases"))
        self._phase_began = now

    @contextmanager
    def _not_fatal(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # an error of the profiler must not end the training
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self._problem = self._problem or f"the profiler failed ({reason})"
