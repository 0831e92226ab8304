"""Write files that are whole or absent after a kill or on a full disk, and files that grow by whole entries."""

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hvd_train.plain_file import in_place

PARTIAL_SUFFIX = ".partial"


@contextmanager
def writing(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """Open a partial file, then force it to disk and rename it.

    `check` is called first, and before the rename. After an error it is called again: if it raises, another process
    may be writing the partial file, which then stays. Raises OSError if the disk is full or `check` raises it.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    check()
    try:
        partial.unlink(missing_ok=True)  # left by a killed process, or a planted link, which must not be followed
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check()
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            check()
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write(path: Path, content: bytes) -> None:
    """Write a whole file, as `writing` does. Raises OSError."""
    with writing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Write a whole file in UTF-8, as `writing` does. Raises OSError."""
    write(path, text.encode())


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk, such as after a rename. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(folder: Path) -> None:
    """Remove partial files of killed processes from a folder. Raises OSError."""
    for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
        leftover.unlink(missing_ok=True)


_AGAIN_S = 1.0  # between tries while the disk is full: each try would write all waiting entries
_MOST_BYTES = 64 * 2**20


class AppendedFile:
    """Appends whole entries. Only a process that is killed leaves a torn one."""

    def __init__(self, path: Path, report: Callable[[str], None], held: Callable[[], bool] = lambda: True) -> None:
        """Prepare to append to `path`, which need not exist. No method raises OSError.

        `report` is called if entries do not fit, and if entries are missing at the end: if more than 64 MB wait, the
        oldest are dropped. If `held()` is False before a write, entries are dropped.
        """
        self._path, self._report, self._held = path, report, held
        self._waiting = deque[bytes]()
        self._waiting_bytes = self._lost = 0
        self._file: int | None = None
        self._failed_before, self._next_try = False, 0.0

    def write(self, entry: bytes) -> None:
        """Append an entry after the waiting ones."""
        self._waiting.append(entry)
        self._waiting_bytes += len(entry)
        while self._waiting_bytes > _MOST_BYTES:
            self._forget_first()
            self._lost += 1
        if time.monotonic() >= self._next_try:
            self._flush()

    def sync(self) -> None:
        """Force written entries to disk."""
        try:
            if self._file is not None:
                os.fsync(self._file)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Write the waiting entries, and close the file."""
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
                written = os.write(self._file, b"".join(self._waiting))
                while self._waiting and written >= len(self._waiting[0]):
                    written -= len(self._waiting[0])
                    self._forget_first()
                if written:  # the disk became full within an entry, whose beginning is removed
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                if self._waiting:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._next_try = 0.0
        except OSError as error:
            self._failed(error)

    def _forget_first(self) -> None:
        self._waiting_bytes -= len(self._waiting.popleft())

    def _failed(self, error: OSError) -> None:
        self._next_try = time.monotonic() + _AGAIN_S
        if not self._failed_before:
            self._failed_before = True
            self._report(f"cannot write {self._path}: {error.strerror}; what belongs there is kept until it fits")
