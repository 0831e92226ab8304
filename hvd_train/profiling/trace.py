"""Traces: read from torch's profiler and from Horovod, and written as one that Perfetto and chrome://tracing show.

All are in the Trace Event Format. Times are nanoseconds since 1970 by the clock of whoever recorded them; written
into the one trace they become microseconds since it began.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_OF_THE_PROFILER = {"Trace", "overhead"}  # torch's categories of events about its profiler, not about the training
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(frozen=True)
class Span:
    """An activity from its start to its end, in nanoseconds."""

    name: str
    start: int
    end: int
    track: str = ""
    """Where it went on: a thread or a stream of a GPU; for Horovod the tensor that it worked on."""
    on_gpu: bool = False

    def earlier(self, by_ns: int) -> Span:
        """Return the span as a clock shows it that is `by_ns` nanoseconds behind this span's."""
        return replace(self, start=self.start - by_ns, end=self.end - by_ns)


def read_torch(document: Mapping[str, Any]) -> list[Span]:
    """Return the spans of a trace that torch's profiler has exported."""
    base, events = document["baseTimeNanoseconds"], document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = []
    for event in events:
        if event["ph"] == "X" and event.get("cat") not in _OF_THE_PROFILER:
            start, on_gpu = base + round(event["ts"] * 1000), event.get("cat") in _ON_GPU
            track = names.get((event["pid"], event["tid"]), f"thread {event['tid']}").strip()
            track = f"GPU {event['pid']} {track}" if on_gpu else track
            spans.append(Span(event["name"], start, start + round(event["dur"] * 1000), track, on_gpu))
    return spans


def read_horovod(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Return the spans of Horovod's timeline.

    The timeline begins and ends while Horovod is at work: an activity without its beginning or its end is left out.
    """
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
    """Return the events of one process of the trace, with a thread for each track in the order of its first span.

    `zero` is the time at which the trace begins, in nanoseconds by the clock of the spans.
    """
    events = [_metadata(pid, 0, "process_name", name=name), _metadata(pid, 0, "process_sort_index", sort_index=pid)]
    tids: dict[str, int] = {}
    for span in spans:
        if span.track not in tids:
            tid = tids[span.track] = len(tids) + 1
            events.append(_metadata(pid, tid, "thread_name", name=span.track))
            events.append(_metadata(pid, tid, "thread_sort_index", sort_index=tid))
        start, length = (span.start - zero) / 1000, (span.end - span.start) / 1000
        thread = {"pid": pid, "tid": tids[span.track]}
        events.append({"ph": "X", "cat": "hvd_train", "name": span.name, **thread, "ts": start, "dur": length})
    return events


def _metadata(pid: int, tid: int, kind: str, **values: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": values}


def packed(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Return events as a rank sends them to rank 0: JSON without the brackets of the list, compressed by gzip."""
    return gzip.compress(json.dumps(events, separators=(",", ":")).encode()[1:-1], 5)


def merged(parts: Iterable[bytes], facts: Mapping[str, Any]) -> bytes:
    """Return the whole trace, compressed by gzip, from the packed events of all ranks and facts about the run."""
    events = b",\n".join(filter(None, map(gzip.decompress, parts)))
    properties = json.dumps({"displayTimeUnit": "ms", "otherData": facts}).encode()[1:-1]
    return gzip.compress(b'{"traceEvents":[\n' + events + b"],\n" + properties + b"}", 5)
