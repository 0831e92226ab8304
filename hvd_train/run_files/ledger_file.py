"""The ledger of a run that trains, open for writing. Opening it costs the same however long the run has been."""

from __future__ import annotations

import os
from pathlib import Path

from hvd_train.run_files import durable
from hvd_train.run_files.ledger import LEDGER, Entry, parse
from hvd_train.run_files.tail import lines_backwards


class LedgerFile:
    """Writes an entry as soon as another one begins: until then steps may join it.

    What is not written yet is in the state of the training, which has all entries of its epoch.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Open the ledger in `folder`, without what goes beyond `step`: the run goes on there, so it did not happen.

        An entry that goes beyond it is removed whole; `took` gets the steps up to `step` again from the state. Only the
        end of the file is read. Raises OSError where the file cannot be written, and UsageError where something else
        than entries stands there.
        """
        self._path = folder / LEDGER
        self._file = open(self._path, "a+b")  # noqa: SIM115  # until close
        self._last_step = 0
        self._unwritten: Entry | None = None
        self._cut(step)
        self.sync()
        durable.sync_folder(folder)

    def took(self, entry: Entry) -> None:
        """Take an entry which has begun, or which another step has joined. Raises OSError."""
        if entry.steps[1] <= self._last_step:
            return
        if self._unwritten is not None and self._unwritten.steps[0] != entry.steps[0]:
            self.complete()
        self._unwritten = entry

    def complete(self) -> None:
        """Write the entry that steps may still join. Raises OSError."""
        entry, self._unwritten = self._unwritten, None
        if entry is None:
            return
        if entry.steps[0] <= self._last_step:  # it was written when the run was stopped, and steps have joined since
            self._cut(entry.steps[0] - 1)
        self._file.write(entry.line().encode())
        self._file.flush()
        self._last_step = entry.steps[1]

    def sync(self) -> None:
        """Force all entries to disk, where they outlive a power failure. Raises OSError."""
        self.complete()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Raises OSError."""
        self._file.close()

    def _cut(self, step: int) -> None:
        """Remove the entries that go beyond `step`, and a torn last line."""
        end = self._last_step = 0
        for begin, line in lines_backwards(self._file):
            if not line.endswith(b"\n"):
                continue
            last_step = parse(line, f"{self._path}: the line at byte {begin}").steps[1]
            if last_step <= step:
                end, self._last_step = begin + len(line), last_step
                break
        self._file.truncate(end)
