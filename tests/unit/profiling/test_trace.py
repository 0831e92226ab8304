"""Traces: clocks that are compared through barriers, Horovod's timeline, what operators take by themselves."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from hvd_train.profiling import trace
from hvd_train.profiling.trace import Clock, Cost, Span


@pytest.mark.parametrize("ahead", [-5_000_000_000, -700, 0, 3_000, 40_000_000])
def test_a_clock_is_known_as_well_as_it_says(ahead: int) -> None:
    """Whatever a rank's clock shows, and however long messages take, the truth is within what is given."""
    chance = random.Random(1)
    mine, theirs, now = [], [], 10**18
    for _ in range(8):
        came, came_there = now + chance.randrange(10**6), now + chance.randrange(10**6)
        met = max(came, came_there)
        left, left_there = met + chance.randrange(1, 10**5), met + chance.randrange(1, 10**5)
        mine.append((came + ahead, left + ahead))
        theirs.append((came_there, left_there))
        now = max(left, left_there)
    found = trace.clock_of(mine, theirs)
    assert abs(found.ahead - ahead) <= found.give_or_take <= 200_000


def test_spans_within_barriers_tell_their_clock() -> None:
    """A clock that fits is left as it is; one that does not is moved to where the barriers allow it."""
    moments = [(1000, 2000), (3000, 4000)]
    assert trace.clock_in([Span("a", 1100, 1950), Span("b", 3050, 3900)], moments) == Clock(0, 50)
    assert trace.clock_in([Span("a", 6100, 6950), Span("b", 8050, 8900)], moments) == Clock(5000, 50)
    assert trace.clock_in([], moments) == trace.SAME


def test_horovods_timeline_is_read_from_wherever_it_begins_to_wherever_it_ends() -> None:
    """Nested spans of a tensor come with its name; an end without its beginning, or the reverse, is left out."""
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


def test_an_operator_costs_what_it_does_itself() -> None:
    """What an operator calls is not counted twice, over several threads; where a GPU works, its kernels count."""
    spans = [
        Span("outer", 0, 10_000_000, "main"),
        Span("inner", 1_000_000, 4_000_000, "main"),
        Span("inner", 4_000_000, 6_000_000, "main"),
        Span("outer", 0, 1_000_000, "other"),
    ]
    assert trace.costs(spans) == [Cost("outer", 6.0, 2), Cost("inner", 5.0, 2)]
    assert trace.costs([*spans, Span("kernel", 0, 500_000, "GPU 0", on_gpu=True)]) == [Cost("kernel", 0.5, 1)]


def test_the_summary_says_what_the_exposed_reduction_waits_for() -> None:
    """Shares of what Horovod does count while the step waits, and once where tensors overlap."""
    milli = 1_000_000
    steps = [Span("step 7", 0, 100 * milli), Span("step 8", 100 * milli, 200 * milli)]
    phases = [
        Span("forward", 0, 80 * milli),
        Span("reduction", 80 * milli, 90 * milli),
        Span("reduction", 170 * milli, 200 * milli),
    ]
    horovod = [
        Span("ALLREDUCE", 70 * milli, 85 * milli, "bias"),
        Span("ALLREDUCE", 75 * milli, 85 * milli, "weight"),
        Span("NEGOTIATE_ALLREDUCE", 160 * milli, 185 * milli, "bias"),
    ]
    *lines, exposed = trace.summary(steps, phases, [Cost("mm", 50.0, 4)], horovod)
    assert [" ".join(line.split()) for line in lines] == [
        "phase ms a step share",
        "forward 40.00 40.0%",
        "reduction 20.00 20.0%",
        "the 10 largest costs total ms share calls",
        "mm 50.00 25.0% 4",
    ]
    assert exposed.strip() == (
        "exposed reduction: 20.00 ms a step (20.0%), longest in step 8 (30.00 ms, until bias); "
        "meanwhile in Horovod: NEGOTIATE_ALLREDUCE 38%, ALLREDUCE 12%"
    )


def test_parts_become_one_whole_trace() -> None:
    """Names and events of all ranks, those without any left out, are one JSON object."""
    one = trace.packed(trace.process(1, "rank 0", [Span("step 1", 5_000, 7_500, "steps")], 1_000))
    whole = json.loads(gzip.decompress(trace.merged([one, trace.packed([]), one], {"steps": "1"})))
    assert whole["otherData"] == {"steps": "1"}
    assert len(whole["traceEvents"]) == 10
    where = {"name": "step 1", "pid": 1, "tid": 1, "ts": 4.0, "dur": 2.5}
    assert whole["traceEvents"][4] == {"ph": "X", "cat": "hvd_train", **where}
