"""Means with their intervals, tables, and the JSON record of a measurement. No torch."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_train.errors import UsageError
from hvd_train.run_files import durable

Measurement = dict[str, Any]  # the result of a measurement, ready for JSON; docs/measuring.md explains its keys


def estimate(values: Sequence[float]) -> tuple[float, list[float] | None]:
    """Return the mean of positive values and its 95% interval by Student's t (None: a single value)."""
    from scipy import stats  # slow to import

    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, None
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return mean, [round(max(0.0, mean - half), 6), round(mean + half, 6)]  # few values make it wide


def table(rows: Sequence[Sequence[str]]) -> str:
    """Write rows of text, the first of which has the titles, right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def check_target(path: Path | None) -> None:
    """Raise UsageError if the folder of `path` is not writable."""
    if path is not None and not os.access(path.parent, os.W_OK):
        raise UsageError(f"--json {path}: the folder {path.parent} does not exist or is not writable; name another")


def write(path: Path, record: Measurement) -> None:
    """Write the record atomically. Raises UsageError if it cannot be written."""
    try:
        durable.write_text(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
