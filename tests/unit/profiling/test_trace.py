"""Traces: what is read of torch's profiler and of Horovod, and the one trace that all become."""

from __future__ import annotations

import gzip
import json

from hvd_train.profiling import trace
from hvd_train.profiling.trace import Span


def test_horovods_timeline_is_read_from_wherever_it_begins_to_wherever_it_ends() -> None:
    """Nested spans of a tensor have its name; an end without its beginning is left out, and so is the reverse."""
    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1000}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "weight"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
        {"ph": "E", "ts": 1, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 2, "pid": 1},
        {"ph": "i", "name": "CYCLE_START", "ts": 3, "s": "g"},
        {"ph": "B", "name": "GLOO_ALLREDUCE", "ts": 3, "pid": 1},
        {"ph": "X", "name": "0", "ts": 4, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 5, "pid": 1},
        {"ph": "E", "ts": 6, "pid": 1, "args": {"dtype": "float32"}},
        {"ph": "B", "name": "ALLREDUCE", "ts": 7, "pid": 1},
    ]
    assert trace.read_horovod(events) == [
        Span("GLOO_ALLREDUCE", 1_003_000, 1_005_000, "weight"),
        Span("ALLREDUCE", 1_002_000, 1_006_000, "weight"),
    ]
    assert trace.read_horovod([]) == []


def test_parts_become_one_whole_trace() -> None:
    """Names and events of all ranks are one JSON object; a rank without events adds nothing to it."""
    one = trace.packed(trace.process(1, "rank 0", [Span("step 1", 5_000, 7_500, "steps")], 1_000))
    whole = json.loads(gzip.decompress(trace.merged([one, trace.packed([]), one], {"steps": "1"})))
    assert whole["otherData"] == {"steps": "1"}
    assert len(whole["traceEvents"]) == 10
    where = {"name": "step 1", "pid": 1, "tid": 1, "ts": 4.0, "dur": 2.5}
    assert whole["traceEvents"][4] == {"ph": "X", "cat": "hvd_train", **where}


def test_torchs_trace_is_read_in_nanoseconds() -> None:
    """Microseconds count from the trace's base; kernels of a GPU are told from operators, the profiler is left out."""
    names = {"pid": 7, "tid": 9, "ph": "M", "name": "thread_name", "args": {"name": "python "}}
    operator = {"pid": 7, "tid": 9, "ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.5, "dur": 2.0}
    kernel = {"pid": 0, "tid": 3, "ph": "X", "cat": "kernel", "name": "gemm", "ts": 2.0, "dur": 0.25}
    profiler = {**operator, "cat": "overhead"}
    document = {"baseTimeNanoseconds": 10**18, "traceEvents": [names, operator, kernel, profiler]}
    assert trace.read_torch(document) == [
        Span("aten::mm", 10**18 + 1500, 10**18 + 3500, "python"),
        Span("gemm", 10**18 + 2000, 10**18 + 2250, "GPU 0 thread 3", on_gpu=True),
    ]
