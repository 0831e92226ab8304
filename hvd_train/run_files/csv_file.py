"""The numbers of a training as a table, metrics.csv: a row for each record, an empty cell for what it does not have."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from typing_extensions import override

from hvd_train import plain_file
from hvd_train.run_files import durable
from hvd_train.run_files.appended_file import AppendedFile
from hvd_train.run_files.destination import Destination
from hvd_train.run_files.durable import Permission, always
from hvd_train.run_files.records import Ending, Numbers
from hvd_train.run_files.rewind import Mark, forget_after

_ALWAYS = ("kind", "step", "epoch", "time")
_LONGEST_HEADER = 1 << 16


class CsvFile(Destination):
    """A table, open for writing. Its columns are named when it is begun, and keep their places for good."""

    def __init__(
        self,
        path: Path,
        resumed_step: int,
        epochs_done: int,
        report: Callable[[str], None],
        permission: Permission = always,
    ) -> None:
        """Prepare to append to `path`; rows of what came after `resumed_step` are removed, as in metrics.jsonl.

        For `report` and `permission` see AppendedFile. Raises OSError where the file cannot be read.
        """
        self._path, self._report, self._permission = path, report, permission
        forget_after(path, resumed_step, epochs_done, _mark_of)
        self._columns = _header(path)
        self._file = AppendedFile(path, report, permission)

    @override
    def begin(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self._columns]
        if not self._columns:
            self._begin_table(names)
        elif missing:  # it was begun by a version, or with a task, that had others
            self._widen(missing)

    @override
    def add(self, numbers: Numbers) -> None:
        if not self._columns:
            self._begin_table(numbers.values)
        epoch = "" if numbers.epoch is None else numbers.epoch
        row: dict[str, object] = {"kind": numbers.kind, "step": numbers.step, "epoch": epoch}
        row |= {"time": f"{numbers.time:.3f}", **numbers.values}
        self._file.write(_row(row.get(name, "") for name in self._columns))

    @override
    def close(self, ending: Ending | None) -> None:
        self._file.close()

    def _begin_table(self, names: Iterable[str]) -> None:
        self._columns = [*_ALWAYS, *names]
        self._file.write(_row(self._columns))

    def _widen(self, names: Sequence[str]) -> None:
        """Put columns behind the others, in a file written anew as a whole; where it cannot be, they are left out."""
        columns = [*self._columns, *names]
        self._file.close()
        self._file = AppendedFile(self._path, self._report, self._permission)
        try:
            with durable.writing(self._path, self._permission) as file, plain_file.opened(self._path) as old:
                old.readline(_LONGEST_HEADER)
                file.write(_row(columns))
                shutil.copyfileobj(old, file)
            self._columns = columns
        except OSError as error:
            self._report(f"{self._path} lacks the columns {', '.join(names)}: {error.strerror}")


def _header(path: Path) -> list[str]:
    """Return the columns of a file; none where there is no table yet. Raises OSError."""
    with suppress(FileNotFoundError), plain_file.opened(path) as file:
        line = file.readline(_LONGEST_HEADER)
        return next(csv.reader([line.decode(errors="replace")]), []) if line.endswith(b"\n") else []
    return []


def _mark_of(line: bytes) -> Mark | None:
    if not line.endswith(b"\n"):  # torn: what is left of a number is a number, too
        return None
    kind, *rest = line.split(b",", 3)
    try:
        step, epoch = (int(cell or 0) for cell in rest[:2])
    except ValueError:
        return Mark("header", 0, 0) if kind == b"kind" else None
    return Mark(kind.decode(errors="replace"), step, epoch)


def _row(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
