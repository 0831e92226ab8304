"""The table of `hvd-train bench scaling`: a row for each number of workers, read from the files of its run."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_train import plain_file
from hvd_train.bench import record
from hvd_train.bench.plots import plots
from hvd_train.bench.record import Record
from hvd_train.bench.scaling_job import Size
from hvd_train.progress import order, schedule
from hvd_train.report.drawing import png
from hvd_train.run_files import durable, run_folder

RECORD, TABLE, TEXT = "scaling.json", "scaling.csv", "scaling.txt"


@dataclass(frozen=True)
class Row:
    """The result of one size. A value is None where it is not known; `failed` says why there is nothing at all.

    `epoch_seconds` is the time of training alone, on which `images_per_second` and `efficiency` are based, too.
    """

    workers: int
    learning_rate: float | None = None
    global_batch_size: int | None = None
    steps_per_epoch: int | None = None
    epoch_seconds: float | None = None
    images_per_second: float | None = None
    efficiency: float | None = None
    val_loss: float | None = None
    test_loss: float | None = None
    top1: float | None = None
    failed: str | None = None


_COLUMNS: dict[str, tuple[str, str]] = {
    "workers": ("workers", "d"),
    "learning_rate": ("learning rate", ".4g"),
    "global_batch_size": ("global batch", ",d"),
    "steps_per_epoch": ("steps/epoch", ",d"),
    "epoch_seconds": ("s/epoch", ",.2f"),
    "images_per_second": ("images/s", ",.1f"),
    "efficiency": ("efficiency", ".1%"),
    "val_loss": ("val loss", ".4f"),
    "test_loss": ("test loss", ".4f"),
    "top1": ("top-1", ".2%"),
}
"""Field of a row: title of its column, and format of its numbers."""


def row_of(size: Size) -> Row:
    """Return the row of a finished training, from the files in its run folder."""
    summary = json.loads(plain_file.read_text(size.folder / run_folder.SUMMARY))
    metrics = plain_file.read_text(size.folder / run_folder.METRICS)
    lines = [json.loads(line) for line in metrics.splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    samples = next(line["num_samples"] for line in lines if line.get("name") == "start")
    cut = order.choose_cut(size.config.batch, size.workers, samples)
    # The summary's speed is that of the run's last life, which has none where it had next to nothing left to do.
    speeds = [summary["images_per_second"], *(line["images_per_second"] for line in reversed(epochs))]
    speed = next((speed for speed in speeds if speed), None)
    losses = [line["val_loss"] for line in epochs if line["val_loss"] is not None]
    tested = summary["test_top1"] is not None
    return Row(
        workers=size.workers,
        learning_rate=schedule.peak_learning_rate(size.config.optimizer, cut.global_batch),
        global_batch_size=cut.global_batch,
        steps_per_epoch=len(cut.batches(range(samples))),
        epoch_seconds=samples / speed if speed else None,
        images_per_second=speed,
        val_loss=min(losses, default=None),
        test_loss=summary["test_loss"],
        top1=summary["test_top1"] if tested else summary["best_top1"],
    )


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their efficiency: images per second and worker over those of the smallest size that ran.

    The formula is the same for weak and for strong scaling.
    """
    base = next((row for row in rows if row.images_per_second), None)
    return [
        dataclasses.replace(row, efficiency=row.images_per_second / row.workers * base.workers / base.images_per_second)
        if base and base.images_per_second and row.images_per_second
        else row
        for row in rows
    ]


def table(rows: Sequence[Row]) -> str:
    """Write the rows as a table for people."""
    cells = [[title for title, _ in _COLUMNS.values()]]
    for row in rows:
        values = [(getattr(row, name), form) for name, (_, form) in _COLUMNS.items()]
        cells.append(["-" if value is None else format(value, form) for value, form in values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([*lines, *(f"{row.workers} workers failed: {row.failed}" for row in rows if row.failed)])


def in_short(row: Row) -> str:
    """Write the speed and efficiency of a row that has not failed."""
    speed = "speed not known" if row.images_per_second is None else f"{row.images_per_second:,.1f} images/s"
    return speed if row.efficiency is None else f"{speed}, efficiency {row.efficiency:.1%}"


def write(folder: Path, measured: Record, rows: Sequence[Row]) -> None:
    """Write the record, the table as CSV and as text, and the plots. Raises UsageError where the record cannot be."""
    record.write(folder / RECORD, measured)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_COLUMNS, "failed"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    durable.write_text(folder / TABLE, text.getvalue())
    durable.write_text(folder / TEXT, table(rows) + "\n")
    for name, chart in plots(measured["rows"], measured["mode"]).items():
        durable.write(folder / f"{name}.png", png(chart))
