"""The section on measured scaling: what `hvd-train bench scaling` has left in its folder, as tables and charts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from hvd_train import plain_file
from hvd_train.errors import UsageError
from hvd_train.report import curves, page
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
    """One measurement: its folder, whether it is of weak or strong scaling, and a row for each number of workers."""

    path: Path
    mode: str
    rows: tuple[Record, ...]


def read(path: Path) -> Scaling:
    """Read the measurement in a folder. Raises UsageError where its record cannot be read."""
    try:
        values = json.loads(plain_file.read_text(path / RECORD))
        rows = [row for row in values["rows"] if isinstance(row, dict)]
        rows.sort(key=lambda row: number(row, "workers") or 0)
        return Scaling(path, str(values.get("mode", "")), tuple(rows))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path / RECORD} is not a record of hvd-train bench scaling") from None


def section(scalings: Sequence[Scaling]) -> Markup:
    """Return a table and charts of each measurement."""
    if not scalings:
        return page.paragraph("No measured scaling: name the folder of a `hvd-train bench scaling` as well.")
    return Markup().join(_table_and_charts(scaling) for scaling in scalings)


def _table_and_charts(scaling: Scaling) -> Markup:
    rows = [[_cell(row, key, form) for key, _, form in COLUMNS] for row in scaling.rows]
    title = f"{scaling.path.resolve().name}: {scaling.mode} scaling".replace(":  ", ": ")
    table = page.table([title for _, title, _ in COLUMNS], rows, numbers=True)
    return page.heading(title) + table + page.figures(curves.scaling(scaling.rows))


def _cell(row: Record, key: str, form: str) -> str:
    value = number(row, key)
    return "—" if value is None else format(value, form)
