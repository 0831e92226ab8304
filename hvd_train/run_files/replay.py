"""The numbers in metrics.jsonl that a service lacks: lost with a process that was killed, or from before its time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from hvd_train import plain_file
from hvd_train.run_files.records import Numbers, numbers_of
from hvd_train.run_files.tail import lines_backwards


def missing(path: Path, size: int, is_new: Callable[[Numbers], bool]) -> Iterator[Numbers]:
    """Yield the numbers in the first `size` bytes of metrics.jsonl that are new, in their order.

    What was not finite is not among them: the file has null for it. Only the end of these bytes is read, back to a step
    that is not new. Raises OSError, and UsageError for a file that is none of a run.
    """
    if not size:
        return
    with plain_file.opened(path) as file:
        begin = 0
        for offset, line in lines_backwards(file):
            begin = offset
            if offset >= size:
                continue
            numbers = _read(line)
            if numbers is not None and numbers.kind == "step" and not is_new(numbers):
                break
        file.seek(begin)
        for line in plain_file.lines(file):
            begin += len(line)
            if begin > size:
                break
            numbers = _read(line)
            if numbers is not None and is_new(numbers):
                yield numbers


def _read(line: bytes) -> Numbers | None:
    with suppress(ValueError, AttributeError, RecursionError):
        return numbers_of(json.loads(line))
    return None
