"""Tables, and the JSON record of a measurement. No torch."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_train.errors import UsageError
from hvd_train.run_files import durable

# the result of a measurement, ready for JSON; docs/measuring.md explains its keys
Measurement = dict[str, Any]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Write rows of text, the first of which has the titles, right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def check_target(path: Path | None) -> None:
    """Raise UsageError if the folder of `path` is not writable."""
    if path is not None and not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"--json {path}: the folder {path.parent} does not exist or is not "
            "writable; name another"
        )


def write(path: Path, record: Measurement) -> None:
    """Write the record atomically. Raises UsageError if it cannot be written."""
    try:
        durable.write_text(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
