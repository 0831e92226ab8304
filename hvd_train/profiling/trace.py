"""Read, merge and sum up traces in Perfetto's Trace Event Format."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


def of_torch(document: Mapping[str, Any], first: int, last: int) -> list[Span]:
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


def of_horovod(events: Sequence[Mapping[str, Any]], first: int, last: int) -> list[Span]:
    """Return the complete spans between two times in Horovod's timeline."""
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


def process(pid: int, name: str, spans: Iterable[Span], zero: int) -> list[Event]:
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


def packed(events: Sequence[Event]) -> bytes:
    """Return events as JSON without the list's brackets, compressed by gzip."""
    return gzip.compress(json.dumps(events, separators=(",", ":")).encode()[1:-1], 5)


def merged(parts: Iterable[bytes], facts: Mapping[str, Any]) -> bytes:
    """Merge packed events and facts of the run to a gzipped trace."""
    events = b",\n".join(filter(None, map(gzip.decompress, parts)))
    properties = json.dumps({"displayTimeUnit": "ms", "otherData": facts}).encode()[1:-1]
    return gzip.compress(b'{"traceEvents":[\n' + events + b"],\n" + properties + b"}", 5)


def named(steps: range) -> str:
    """Return "steps 20 to 25", or "step 20"."""
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def summary(
    steps: Sequence[Span], phases: Sequence[Span], costs: Sequence[tuple[str, float, int]], horovod: Sequence[Span]
) -> list[str]:
    """Return the lines for the user. `costs` are operators or kernels: name, own microseconds, number of calls."""
    total = sum(step.end - step.start for step in steps)
    lines = [f"  {'phase':<44} {'ms a step':>10} {'share':>6}"]
    for name in dict.fromkeys(span.name for span in phases):
        spent = sum(span.end - span.start for span in phases if span.name == name)
        lines.append(f"  {name:<44} {spent / 1e6 / len(steps):10.2f} {spent / total:6.1%}")
    lines.append(f"  {f'the {_NUM_COSTS} largest costs':<44} {'total ms':>10} {'share':>6} {'calls':>7}")
    for name, microseconds, calls in sorted(costs, key=lambda cost: -cost[1])[:_NUM_COSTS]:
        lines.append(f"  {name[:44]:<44} {microseconds / 1e3:10.2f} {microseconds * 1e3 / total:6.1%} {calls:7}")
    waits = [span for span in phases if span.name == "reduction"]
    waited = sum(wait.end - wait.start for wait in waits)
    line = f"  exposed reduction: {waited / 1e6 / len(steps):.2f} ms a step ({waited / total:.1%})"
    if waited and horovod:
        shares = {
            name: sum(_overlap([span for span in horovod if span.name == name], wait) for wait in waits) / waited
            for name in dict.fromkeys(span.name for span in horovod)
        }
        largest = sorted(shares.items(), key=lambda item: -item[1])
        activities = [f"{name} {share:.0%}" for name, share in largest if share >= 0.01]
        line += f"; meanwhile in Horovod: {', '.join(activities) or 'nothing'}"
    return [*lines, line]


def _overlap(spans: Iterable[Span], window: Span) -> int:
    """Return the nanoseconds of the window that any of the spans covers."""
    covered, reached = 0, window.start
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, reached), min(span.end, window.end)
        if end > start:
            covered, reached = covered + end - start, end
    return covered
