"""Assertions that hold for every trace that a run leaves."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read(path: Path) -> dict[str, dict[str, list[Event]]]:
    """Return the spans of a trace by process and thread, ordered by time; assert its format and that spans nest."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert len(set(processes.values())) == len(processes)
    found: dict[str, dict[str, list[Event]]] = {name: defaultdict(list) for name in processes.values()}
    for event in events:
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            found[processes[event["pid"]]][threads[event["pid"], event["tid"]]].append(event)
    for spans in (spans for of_process in found.values() for spans in of_process.values()):
        spans.sort(key=lambda span: (span["ts"], -span["dur"]))
        ends: list[float] = []
        for span in spans:
            while ends and ends[-1] <= span["ts"] + 1e-3:  # a nanosecond
                ends.pop()
            assert not ends or span["ts"] + span["dur"] <= ends[-1] + 2e-3, span
            ends.append(span["ts"] + span["dur"])
    return found
