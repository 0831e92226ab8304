"""A file that a run appends to. Entries that a full disk does not take are kept, and written when they fit."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hvd_train.plain_file import in_place
from hvd_train.run_files.durable import sync_folder

_AGAIN_S = 1.0  # how often a disk that was full is tried: each try would write all that is waiting
_MOST_BYTES = 64 * 2**20


class AppendedFile:
    """Appends entries. Each is in the file as a whole or not at all, unless the process is killed in the middle."""

    def __init__(
        self,
        path: Path,
        report: Callable[[str], None],
        held: Callable[[], bool] = lambda: True,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """Prepare to append to `path`, which need not exist. Neither this nor any method raises OSError.

        `report` takes a sentence for the user, once each: if entries do not fit, if more than `most_bytes` of them wait
        and the oldest are lost, and how many are missing at the end. If `held`, called before each write, returns
        False, entries are dropped.
        """
        self._path, self._report, self._held, self._most_bytes = path, report, held, most_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._lost = 0
        self._file: int | None = None
        self._failed_before = False
        self._next_try = 0.0

    def write(self, entry: bytes) -> None:
        """Append an entry after those that are still waiting."""
        self._waiting.append(entry)
        self._waiting_bytes += len(entry)
        while self._waiting_bytes > self._most_bytes:
            self._forget_first()
            self._lost += 1
            if self._lost == 1:
                self._report(f"{self._path}: too much is waiting for the disk, the oldest of it is lost")
        if time.monotonic() >= self._next_try:
            self._flush()

    def take_back(self) -> bool:
        """Forget the newest entry if it is still waiting; return False if it is in the file already."""
        if not self._waiting:
            return False
        self._waiting_bytes -= len(self._waiting.pop())
        return True

    def sync(self) -> None:
        """Force written entries to disk, so that they survive a power failure."""
        try:
            if self._file is not None:
                os.fsync(self._file)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Write the entries that still wait, and close the file."""
        self._flush()
        if missing := len(self._waiting) + self._lost:
            self._report(f"{self._path} lacks {missing} entries, which could not be written")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _flush(self) -> None:
        if not self._held():
            self._waiting.clear()
            self._waiting_bytes = 0
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(exist_ok=True)
                self._file = in_place(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                sync_folder(self._path.parent)
            if self._waiting:
                self._append_waiting(self._file)
            self._next_try = 0.0
        except OSError as error:
            self._failed(error)

    def _append_waiting(self, file: int) -> None:
        written = os.write(file, b"".join(self._waiting))
        while self._waiting and written >= len(self._waiting[0]):
            written -= len(self._waiting[0])
            self._forget_first()
        if self._waiting:
            if written:  # the disk has become full within an entry, whose beginning is taken back
                os.ftruncate(file, os.fstat(file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _forget_first(self) -> None:
        self._waiting_bytes -= len(self._waiting.popleft())

    def _failed(self, error: OSError) -> None:
        self._next_try = time.monotonic() + _AGAIN_S
        if not self._failed_before:
            self._failed_before = True
            self._report(f"cannot write {self._path}: {error.strerror}; what belongs there is kept until it fits")
