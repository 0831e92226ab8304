"""Show what `hvd-train bench scaling` measured: the section of the page, and the charts that bench writes as PNG."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from markupsafe import Markup

from hvd_train import plain_file
from hvd_train.errors import UsageError
from hvd_train.report.charts import Chart, Line
from hvd_train.report.page import pieces
from hvd_train.run_files.history import Record, number

RECORD = "scaling.json"
COLUMNS = (
    ("workers", "workers", ",.0f"),
    ("learning_rate", "learning rate", ".4g"),
    ("global_batch_size", "global batch", ",.0f"),
    ("steps_per_epoch", "steps per epoch", ",.0f"),
    ("epoch_seconds", "epoch, s", ",.2f"),
    ("images_per_second", "images/s", ",.0f"),
    ("efficiency", "efficiency", ".1%"),
    ("val_loss", "best val loss", ".4f"),
    ("test_loss", "test loss", ".4f"),
    ("top1", "top-1", ".2%"),
)
"""Key of a row, title of its column, and the format of its numbers."""


@dataclass(frozen=True)
class Scaling:
    """A measurement: its folder, its mode (weak or strong scaling), and a row for each number of workers."""

    path: Path
    mode: str
    rows: tuple[Record, ...]


def read(path: Path) -> Scaling:
    """Read the measurement in a folder.

    Raises: UsageError: if its record cannot be read.
    """
    try:
        values = json.loads(plain_file.read_text(path / RECORD))
        rows = [row for row in values["rows"] if isinstance(row, dict)]
        rows.sort(key=lambda row: number(row, "workers") or 0)
        return Scaling(path, str(values.get("mode", "")), tuple(rows))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path / RECORD} is not a record of hvd-train bench scaling") from None


def charts(rows: Sequence[Record], mode: str) -> dict[str, Chart]:
    """Return charts over the number of workers, by the names of their files without suffix.

    `rows` are the rows of scaling.json; a value that is missing or None leaves a gap.
    """
    workers = [number(row, "workers") for row in rows]
    ticks = sorted({n for n in workers if n and n > 0})
    chart = partial(Chart, x="workers", ticks=ticks)

    def line(name: str, key: str) -> Line:
        return name, workers, [number(row, key) for row in rows]

    rates = line("measured", "images_per_second")
    base, rate = next(((n, rate) for n, rate in zip(workers, rates[2], strict=True) if n and rate), (1.0, 0.0))
    ideal = ("ideal", workers, [rate * n / base if n and rate else None for n in workers])
    losses = [line("best validation", "val_loss"), line("test", "test_loss")]
    efficiency, seconds, top1 = ([line("", key)] for key in ("efficiency", "epoch_seconds", "top1"))
    title = f"({mode} scaling)"
    return {
        "throughput": chart(f"Throughput {title}", y="images/s", lines=[rates, ideal], log=len(ticks) > 1),
        "efficiency": chart(f"Efficiency {title}", y="of ideal", lines=efficiency, percent=True, zero=True),
        "epoch_time": chart("Time of an epoch", y="seconds", lines=seconds, zero=True),
        "loss": chart("Loss", y="cross entropy", lines=losses),
        "top1": chart("Top-1", y="accuracy", lines=top1, percent=True),
    }


def section(scalings: Sequence[Scaling]) -> Markup:
    """Return a table and charts of each measurement."""
    if not scalings:
        return Markup().join([pieces.paragraph("No measured scaling: add the folder of a `hvd-train bench scaling`.")])
    body = []
    for scaling in scalings:
        cells = [[(number(row, key), form) for key, _, form in COLUMNS] for row in scaling.rows]
        rows = [["—" if value is None else format(value, form) for value, form in row] for row in cells]
        body += [
            pieces.heading(f"{scaling.path.resolve().name}: {scaling.mode} scaling"),
            pieces.table([title for _, title, _ in COLUMNS], rows, numbers=True),
            pieces.figures(charts(scaling.rows, scaling.mode).values()),
        ]
    return Markup().join(body)
