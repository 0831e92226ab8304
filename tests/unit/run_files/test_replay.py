"""What a service lacks of metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from hvd_train.run_files import replay

METRICS = Path("metrics.jsonl")


def test_what_is_new_comes_in_its_order() -> None:
    """Steps, evaluations and changes of world under the names that they had; other lines are none of it."""
    lines = [
        {"kind": "step", "step": 10, "epoch": 1, "time": 1.0, "samples": 9, "loss": 0.5, "split": {"data": 0.1}},
        {"kind": "event", "name": "note", "message": "hello", "time": 2.0},
        {"kind": "epoch", "step": 10, "epoch": 1, "time": 3.0, "loss": 0.5, "val_top1": 0.25, "val_loss": None},
        {"kind": "event", "name": "world", "step": 11, "time": 4.0, "world_size": 2, "seconds": 0.5, "left": []},
        {"kind": "step", "step": 20, "epoch": 2, "time": 5.0, "loss": 0.25, "split": None},
    ]
    METRICS.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    found = list(replay.missing(METRICS, METRICS.stat().st_size, lambda numbers: True))
    assert [(one.kind, one.step, one.epoch, one.time) for one in found] == [
        ("step", 10, 1, 1.0),
        ("epoch", 10, 1, 3.0),
        ("world", 11, None, 4.0),
        ("step", 20, 2, 5.0),
    ]
    assert [dict(one.values) for one in found] == [
        {"train/loss": 0.5, "seconds/data": 0.1},
        {"val/top1": 0.25},
        {"world/size": 2, "world/seconds_to_next_step": 0.5},
        {"train/loss": 0.25},
    ]


def test_no_more_is_read_than_is_new() -> None:
    """Of a long run, whose service lacks the last steps, only these."""
    line = '{{"kind": "step", "step": {}, "epoch": 1, "time": 1.0, "loss": 0.5}}\n'
    METRICS.write_text("".join(line.format(step) for step in range(1, 10_001)))
    asked = 0

    def is_new(numbers: replay.Numbers) -> bool:
        nonlocal asked
        asked += 1
        return numbers.step > 9_990

    assert [numbers.step for numbers in replay.missing(METRICS, METRICS.stat().st_size, is_new)] == list(
        range(9_991, 10_001)
    )
    assert asked < 50


def test_what_is_written_meanwhile_is_left_out() -> None:
    """The journal gives it to the service itself, also where it is not finite."""
    line = '{{"kind": "step", "step": {}, "epoch": 1, "time": 1.0, "loss": 0.5}}\n'
    METRICS.write_text("".join(line.format(step) for step in (1, 2)))
    size = METRICS.stat().st_size
    with METRICS.open("a") as file:
        file.write(line.format(3))
    assert [numbers.step for numbers in replay.missing(METRICS, size, lambda numbers: True)] == [1, 2]


def test_a_run_without_records_lacks_nothing() -> None:
    """Its first line is still to be written."""
    assert list(replay.missing(METRICS, 0, lambda numbers: True)) == []
