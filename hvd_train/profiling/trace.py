"""Traces in the Trace Event Format, which Perfetto and chrome://tracing read: those of the ranks and of Horovod in one.

Times are nanoseconds of a rank's own clock until they are written, then microseconds since the trace began.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_NO_SPANS = {"Trace", "overhead"}  # categories of torch's events that tell of its profiler, not of the training
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_SHOWN = 10


@dataclass(frozen=True)
class Span:
    """Something that went on from one time to another."""

    name: str
    start: int
    end: int
    track: str = ""
    """A thread, a GPU's stream; the tensor, where Horovod did it."""
    on_gpu: bool = False

    def earlier(self, by: int) -> Span:
        """The same, by a clock that is so far behind."""
        return replace(self, start=self.start - by, end=self.end - by)


@dataclass(frozen=True)
class Cost:
    """What an operator took in all calls together, without those that it made."""

    name: str
    milliseconds: float
    calls: int


@dataclass(frozen=True)
class Clock:
    """How far a clock is ahead of another one, and how much more or less that may be."""

    ahead: int
    give_or_take: int


SAME = Clock(0, 0)
Moments = Sequence[tuple[int, int]]
"""When a rank came to each of some barriers, and when it left it."""


def clock(bounds: Iterable[tuple[int, int]]) -> Clock:
    """A clock from the lowest and the highest value that each look at it allows; none ahead if it may be."""
    lows, highs = zip(*bounds, strict=True)
    low, high = sorted((max(lows), min(highs)))  # in reverse where a clock has moved from one look to the next
    return Clock(0, max(-low, high)) if low <= 0 <= high else Clock((low + high) // 2, (high - low + 1) // 2)


def clock_of(mine: Moments, theirs: Moments) -> Clock:
    """A rank's clock against another's: nobody leaves a barrier before all have come, whatever the clocks say."""
    pairs = zip(mine, theirs, strict=True)
    return clock((came - their_leaving, left - their_coming) for (came, left), (their_coming, their_leaving) in pairs)


def clock_in(spans: Sequence[Span], moments: Moments) -> Clock:
    """The clock of these spans, each of which went on within the barrier of the same number. Without them: the same."""
    pairs = list(zip(spans, moments, strict=False))
    return clock((span.end - left, span.start - came) for span, (came, left) in pairs) if pairs else SAME


def read_torch(document: Mapping[str, Any]) -> list[Span]:
    """The spans of a torch profiler's trace."""
    base, events = document["baseTimeNanoseconds"], document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = []
    for event in events:
        if event["ph"] == "X" and event.get("cat") not in _NO_SPANS:
            start, on_gpu = base + round(event["ts"] * 1000), event.get("cat") in _ON_GPU
            track = names.get((event["pid"], event["tid"]), f"thread {event['tid']}").strip()
            track = f"GPU {event['pid']} {track}" if on_gpu else track
            spans.append(Span(event["name"], start, start + round(event["dur"] * 1000), track, on_gpu))
    return spans


def read_horovod(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The spans of Horovod's timeline. It begins and ends in the midst of things: only whole ones are taken."""
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
    return spans


def process(pid: int, name: str, spans: Iterable[Span], zero: int) -> list[dict[str, Any]]:
    """The events of a process of the trace, with a thread for each track, in the order in which they come."""
    events = [_about(pid, 0, "process_name", name=name), _about(pid, 0, "process_sort_index", sort_index=pid)]
    tids: dict[str, int] = {}
    for span in spans:
        if span.track not in tids:
            tid = tids[span.track] = len(tids) + 1
            events.append(_about(pid, tid, "thread_name", name=span.track))
            events.append(_about(pid, tid, "thread_sort_index", sort_index=tid))
        start, length = (span.start - zero) / 1000, (span.end - span.start) / 1000
        where = {"pid": pid, "tid": tids[span.track]}
        events.append({"ph": "X", "cat": "hvd_train", "name": span.name, **where, "ts": start, "dur": length})
    return events


def _about(pid: int, tid: int, what: str, **facts: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": facts}


def packed(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Events on their way to rank 0."""
    return gzip.compress(json.dumps(events, separators=(",", ":")).encode()[1:-1], 5)


def merged(parts: Iterable[bytes], facts: Mapping[str, Any]) -> bytes:
    """The whole trace (gzip) from the packed events of all ranks."""
    events = b",\n".join(filter(None, map(gzip.decompress, parts)))
    about = json.dumps({"displayTimeUnit": "ms", "otherData": facts}).encode()[1:-1]
    return gzip.compress(b'{"traceEvents":[\n' + events + b"],\n" + about + b"}", 5)


# ------------------------------------------------------------------------------------------------ what it comes to


def costs(spans: Sequence[Span]) -> list[Cost]:
    """What each operator took by itself; on a GPU, what each kernel took there."""
    own: dict[str, int] = {}
    calls: dict[str, int] = {}
    on_gpu = any(span.on_gpu for span in spans)
    tracks: dict[str, list[Span]] = {}  # what goes on on each at the moment, from the outermost to the innermost
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.on_gpu != on_gpu:
            continue
        length, outer = span.end - span.start, tracks.setdefault(span.track, [])
        while outer and outer[-1].end <= span.start:
            outer.pop()
        if outer and not on_gpu:
            own[outer[-1].name] -= length
        outer.append(span)
        own[span.name], calls[span.name] = own.get(span.name, 0) + length, calls.get(span.name, 0) + 1
    return [Cost(name, spent / 1e6, calls[name]) for name, spent in own.items()]


def summary(steps: Sequence[Span], phases: Sequence[Span], costs: Sequence[Cost], horovod: Sequence[Span]) -> list[str]:
    """Where the time of these steps went on one rank: by phases, by operators, and what the reduction waited for."""
    whole = sum(step.end - step.start for step in steps) / 1e6
    lines = [f"  {'phase':<44} {'ms a step':>10} {'share':>6}"]
    for name in dict.fromkeys(span.name for span in phases):
        spent = sum(span.end - span.start for span in phases if span.name == name) / 1e6
        lines.append(f"  {name:<44} {spent / len(steps):10.2f} {spent / whole:6.1%}")
    lines.append(f"  {f'the {_SHOWN} largest costs':<44} {'total ms':>10} {'share':>6} {'calls':>7}")
    for cost in sorted(costs, key=lambda cost: -cost.milliseconds)[:_SHOWN]:
        share = cost.milliseconds / whole
        lines.append(f"  {cost.name[:44]:<44} {cost.milliseconds:10.2f} {share:6.1%} {cost.calls:7}")
    waits = [span for span in phases if span.name == "reduction"]
    return [*lines, f"  {_exposed(steps, waits, horovod, whole)}"]


def _exposed(steps: Sequence[Span], waits: Sequence[Span], horovod: Sequence[Span], whole: float) -> str:
    """Where the reduction does not hide behind the backward pass, and what Horovod does in that time."""
    spent = sum(wait.end - wait.start for wait in waits) / 1e6
    line = f"exposed reduction: {spent / len(steps):.2f} ms a step ({spent / whole:.1%})"
    if not waits or not horovod:
        return line
    longest = max(waits, key=lambda wait: wait.end - wait.start)
    step = next((step.name for step in steps if step.start <= longest.start < step.end), "")
    shares = {
        name: sum(_overlap([span for span in horovod if span.name == name], wait) for wait in waits) / 1e6 / spent
        for name in dict.fromkeys(span.name for span in horovod)
    }
    seen = [f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda one: -one[1]) if share >= 0.01]
    last = max((s for s in horovod if longest.start < s.end <= longest.end), key=lambda s: s.end, default=None)
    line += f", longest in {step} ({(longest.end - longest.start) / 1e6:.2f} ms"
    line += f", until {last.track})" if last else ")"
    return f"{line}; meanwhile in Horovod: {', '.join(seen) or 'nothing'}"


def _overlap(spans: Iterable[Span], window: Span) -> int:
    """How long any of them goes on within the window."""
    covered, reached = 0, window.start
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, reached), min(span.end, window.end)
        if end > start:
            covered, reached = covered + end - start, end
    return covered
