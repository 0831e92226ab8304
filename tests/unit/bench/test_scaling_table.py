"""The rows of a scaling table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hvd_train import recipes
from hvd_train.bench import scaling_table
from hvd_train.bench.scaling_job import Size
from hvd_train.bench.scaling_table import Row
from hvd_train.run_files import durable


def test_efficiency_goes_by_the_smallest_size_that_ran() -> None:
    """Speed per worker over its; a size that failed has none and is no base."""
    rows = [Row(1, failed="why"), Row(2, images_per_second=100.0), Row(4, images_per_second=150.0), Row(8)]
    assert [row.efficiency for row in scaling_table.with_efficiency(rows)] == [None, 1.0, 0.75, None]
    assert scaling_table.with_efficiency([Row(1, failed="why")])[0].efficiency is None


def trained(speed: float, *lines: dict[str, Any], **summary: Any) -> Row:
    """The row of a run folder with these files."""
    folder = Path("np-2")
    folder.mkdir(exist_ok=True)
    start = {"kind": "event", "name": "start", "num_samples": 130}
    text = "".join(json.dumps(line) + "\n" for line in (start, *lines))
    durable.write_text(folder / "metrics.jsonl", text)
    known = {"epochs": 3, "images_per_second": speed, "test_loss": None, "test_top1": None, "best_top1": None}
    durable.write_text(folder / "summary.json", json.dumps({**known, **summary}))
    config = recipes.get("digits").replace(learning_rate=0.1, lr_scaling="linear", lr_base_batch=32)
    return scaling_table.row_of(Size(2, config, folder))


def epoch(val_loss: float | None, speed: float) -> dict[str, Any]:
    """A line of metrics."""
    return {"kind": "epoch", "val_loss": val_loss, "images_per_second": speed}


def test_the_row_of_a_training() -> None:
    """Best validation loss, test's own top-1 where there is a test set, and epochs by the clock of training."""
    row = trained(65.0, epoch(0.5, 60.0), epoch(0.4, 65.0), epoch(0.6, 65.0), test_loss=0.3, test_top1=0.9)
    assert row == Row(2, 0.2, 64, 3, 2.0, 65.0, None, 0.4, 0.3, 0.9, 3.0)


def test_epochs_in_the_time_that_each_size_had() -> None:
    """With the part of the last one, which the time has cut off."""
    assert trained(65.0, epochs=4, epoch_share=0.25).epochs == 4.25


def test_the_row_of_a_training_with_gaps() -> None:
    """No validation, or a last life with nothing left to do: the gap is a gap, the speed is the last one measured."""
    assert trained(0.0, epoch(None, 26.0), epoch(None, 0.0), best_top1=0.7) == Row(
        2, 0.2, 64, 3, 5.0, 26.0, top1=0.7, epochs=3.0
    )
    assert trained(0.0).images_per_second is None
