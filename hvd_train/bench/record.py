"""Means with their intervals, tables, and the JSON record of a measurement. No torch."""

import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_train.errors import UsageError
from hvd_train.run_files import durable

Measurement = dict[str, Any]  # the result of a measurement, ready for JSON; docs/measuring.md explains its keys

# Student's t for 95%, for 1 to 20 degrees of freedom. For more, 1.96 + 2.4 / degrees is right to 0.3%.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


def estimate(values: Sequence[float]) -> tuple[float, list[float] | None]:
    """Return the mean of positive values and its 95% interval by Student's t (None: a single value)."""
    mean, degrees = statistics.fmean(values), len(values) - 1
    if not degrees:
        return mean, None
    t = _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.4 / degrees
    half = t * statistics.stdev(values) / math.sqrt(len(values))
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
