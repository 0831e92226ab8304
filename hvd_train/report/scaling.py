"""Show what `hvd-train bench scaling` measured: a section of the page, and charts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from hvd_train import plain_file
from hvd_train.errors import UsageError
from hvd_train.report.charts import Chart
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
"""Key of a row, title of its column, and format of its numbers."""


@dataclass(frozen=True)
class Scaling:
    """A measurement of weak or strong scaling, with a row for each number of workers."""

    path: Path
    mode: str
    rows: tuple[Record, ...]


def read(path: Path) -> Scaling:
    """Return the measurement in a folder. Raises UsageError if its record cannot be read."""
    try:
        values = json.loads(plain_file.read_text(path / RECORD))
        rows = [row for row in values["rows"] if isinstance(row, dict)]
        rows.sort(key=lambda row: number(row, "workers") or 0)
        return Scaling(path, str(values.get("mode", "")), tuple(rows))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path / RECORD} is not a record of hvd-train bench scaling") from None


def charts(rows: Sequence[Record]) -> dict[str, Chart]:
    """Return charts over workers, by name, from the rows of scaling.json."""
    keys = ("workers", "images_per_second", "efficiency")
    workers, rates, efficiency = ([number(row, key) for row in rows] for key in keys)
    ticks = sorted({n for n in workers if n and n > 0})
    base, rate = next(((n, rate) for n, rate in zip(workers, rates, strict=True) if n and rate), (1.0, 0.0))
    ideal = [rate * n / base if n and rate else None for n in workers]
    speeds = [("measured", workers, rates), ("ideal", workers, ideal)]
    return {
        "throughput": Chart("Images/s", "workers", speeds, log=len(ticks) > 1, ticks=ticks),
        "efficiency": Chart("Efficiency", "workers", [("", workers, efficiency)], percent=True, zero=True, ticks=ticks),
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
            pieces.figures(charts(scaling.rows).values()),
        ]
    return Markup().join(body)
