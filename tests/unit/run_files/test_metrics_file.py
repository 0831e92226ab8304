"""metrics.jsonl read on: what is new, what has been taken back, and what stands for many records."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hvd_train.progress.figures import OF_CLASSES
from hvd_train.run_files.metrics_file import MetricsFile, better_epoch, mean_of_steps, number
from tests.support.run_folders import START, epoch, event, start, step

PATH = Path("metrics.jsonl")
TOP1 = OF_CLASSES[1]


def text(lines: Iterable[dict[str, Any]]) -> str:
    """The lines as a run writes them."""
    return "".join(json.dumps(line) + "\n" for line in lines)


def looked(metrics: MetricsFile) -> list[float | None]:
    """The steps after one more look."""
    metrics.look()
    return [number(record, "step") for record in metrics.steps.values()]


def bytes_read() -> int:
    """The bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_look_reads_what_is_new() -> None:
    """A second look at a file of megabytes that has grown by a line reads some kilobytes."""
    metrics = MetricsFile(PATH)
    PATH.write_text(text([start(), *map(step, range(1, 10_000))]))
    assert looked(metrics)[-1] == 9999
    with PATH.open("a") as file:
        file.write(text([step(10_000)]))
    before = bytes_read()
    assert looked(metrics)[-1] == 10_000
    assert bytes_read() - before < 50_000


def test_a_line_is_taken_when_it_is_whole() -> None:
    """A look may come while a line is being written: it is called torn until it is there."""
    metrics = MetricsFile(PATH)
    whole = text([step(2)])
    PATH.write_text(text([step(1)]) + whole[:40])
    assert (looked(metrics), len(metrics.gaps())) == ([1], 1)
    PATH.write_text(text([step(1)]) + whole)
    assert (looked(metrics), metrics.gaps()) == ([1, 2], [])


@pytest.mark.parametrize("how", ["in place", "by a file of its name", "to a longer one"])
def test_what_was_taken_back_is_forgotten(how: str) -> None:
    """A run that is resumed cuts off steps that were lost, and writes them again: they are not shown twice."""
    metrics = MetricsFile(PATH)
    PATH.write_text(text([start(), step(1), step(2), step(3)]))
    assert looked(metrics) == [1, 2, 3]
    again = [start(), step(1), step(2, loss=0.5)]
    if how == "by a file of its name":
        Path("new").write_text(text(again))
        os.replace("new", PATH)
    else:
        PATH.write_text(text([*again, step(3, 50), step(4, 51)] if how == "to a longer one" else again))
    assert looked(metrics) == ([1, 2, 3, 4] if how == "to a longer one" else [1, 2])
    assert metrics.steps.values()[1]["loss"] == 0.5


def test_a_pause_ends_with_the_notes_before_the_start_whenever_one_looks() -> None:
    """What was shown of the notes before the start was there is put right."""
    lines = [start(), step(1), event("note", 9000), event("checkpoint", 9001), start(9002), step(2, 9005)]
    in_steps = MetricsFile(PATH)
    for end in range(1, len(lines) + 1):
        PATH.write_text(text(lines[:end]))
        in_steps.look()
    assert [record["elapsed"] for record in (*in_steps.events(), *in_steps.steps.values())] == [0, 1, 2, 3, 1, 6]


def test_of_thousands_of_events_the_first_and_the_last_are_kept() -> None:
    """So are the last changes of the world among the others; all are counted."""
    lines = [event("skipped", number, f"number {number}") for number in range(3000)]
    lines[1000], lines[1500] = start(1000, world_size=7), event("world", 1500, world_size=5)
    PATH.write_text(text(lines))
    metrics = MetricsFile(PATH)
    metrics.look()
    events = metrics.events()
    assert (metrics.num_events, len(events)) == (3000, 1002)
    assert [event["message"] for event in (events[0], events[-1])] == ["number 0", "number 2999"]
    assert [event["world_size"] for event in events if "world_size" in event] == [7, 5]


def test_a_line_that_is_none_of_a_run_is_not_kept() -> None:
    """Thousands of records of some kilobytes each would be what a planted file has in memory."""
    PATH.write_text(text([step(1), step(2, more="x" * 20_000), event("note", 3, "x" * 300_000)]))
    metrics = MetricsFile(PATH)
    assert looked(metrics) == [1]
    assert metrics.gaps() == ["2 lines of metrics.jsonl cannot be read, the first of them line 2"]


def test_a_record_stands_for_two_steps() -> None:
    """Means of the numbers that both have, what one has alone, and means of the time split."""
    one = step(1, loss=3.0, split={"data": 1.0, "forward": 2.0}) | {"elapsed": 1.0}
    other = step(2, loss=None, split={"data": 3.0, "forward": 2.0}, skipped_steps=4) | {"elapsed": 2.0}
    joined = mean_of_steps(one, other)
    assert (joined["step"], joined["samples"], joined["elapsed"], joined["loss"]) == (1.5, 150, 1.5, 3.0)
    assert (joined["kind"], joined["skipped_steps"]) == ("step", 4)
    assert joined["split"] == {"data": 2.0, "forward": 2.0}
    assert mean_of_steps(one, step(2, time=START))["split"] == one["split"]
    assert mean_of_steps(step(1), step(2, split={"data": 1.0}))["split"] == {"data": 1.0}


@pytest.mark.parametrize(
    ("scores", "kept"), [((0.5, 0.6), 2), ((0.6, 0.5), 1), ((0.5, 0.5), 1), ((None, 0.0), 2), ((None, None), 2)]
)
def test_of_two_epochs_the_better_one_stays(scores: tuple[float | None, float | None], kept: int) -> None:
    """The best one of a run is never lost; of those without a score the last one stays."""
    one, other = (epoch(number, val_top1=score) for number, score in zip((1, 2), scores, strict=True))
    assert better_epoch(one, other, TOP1)["epoch"] == kept
