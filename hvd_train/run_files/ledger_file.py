"""Write the ledger of a run."""

from collections.abc import Callable

from hvd_train.console import say
from hvd_train.plain_file import in_place
from hvd_train.run_files.ledger import LEDGER, Entry, parse
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.run_files.tail import lines_backwards


class LedgerFile:
    """Writes an entry when the next one begins: until then steps may join it, and the state holds it."""

    def __init__(self, folder: RunFolder, step: int, report: Callable[[str], None] = say) -> None:
        """Open the ledger in `folder` and remove entries that reach beyond `step`.

        `took` gets their earlier steps again. Raises OSError, and UsageError if the file holds anything but entries.
        """
        self._folder, self._path = folder, folder.path / LEDGER
        self._file = folder.append(LEDGER, report)
        self._last_step = 0
        self._unwritten: Entry | None = None
        if self._path.exists():
            self._cut(step, changes=False)

    def took(self, entry: Entry) -> None:
        """Record a new or extended entry, or a change of the data."""
        if entry.data_changed:
            self.complete()
            self._file.write(entry.line().encode())
            return
        if entry.steps[1] <= self._last_step:
            return
        if self._unwritten is not None and self._unwritten.steps[0] != entry.steps[0]:
            self.complete()
        self._unwritten = entry

    def complete(self) -> None:
        """Write the entry that steps may still join."""
        entry, self._unwritten = self._unwritten, None
        if entry is None or not self._folder.held():
            return
        if entry.steps[0] <= self._last_step and not self._file.take_back():
            # A stop wrote the entry, and steps have joined since.
            self._cut(entry.steps[0] - 1, changes=True)
        self._file.write(entry.line().encode())
        self._last_step = entry.steps[1]

    def sync(self) -> None:
        """Force all entries to disk."""
        self.complete()
        self._file.sync()

    def close(self) -> None:
        """Write all entries, and close the file."""
        self.complete()
        self._file.close()

    def _cut(self, step: int, *, changes: bool) -> None:
        """Remove entries beyond `step`, and a torn last line; `changes` keeps a change of data right after `step`."""
        with open(self._path, "r+b", opener=in_place) as file:
            end = self._last_step = 0
            for begin, line in lines_backwards(file):
                if not line.endswith(b"\n"):
                    continue
                first, last = parse(line, f"{self._path}: the line at byte {begin}").steps
                if (last if changes else max(first, last)) <= step:
                    end, self._last_step = begin + len(line), last
                    break
            file.truncate(end)
