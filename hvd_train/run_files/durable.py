"""Write files that are whole or absent after a kill or on a full disk, and files
that grow by whole entries.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hvd_train.plain_file import in_place

PARTIAL_SUFFIX = ".partial"


@contextmanager
def writing(path: Path, held: Callable[[], bool] = lambda: True) -> Iterator[BinaryIO]:
    """Open a partial file, then force it to disk and rename it.

    Raises OSError if the disk is full, or if `held()` is False: another process may be writing the
    same files.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    taken_over = OSError(errno.EPERM, "another process has taken over the folder", str(path))
    if not held():
        raise taken_over
    try:
        # left by a killed process, or a planted link, which must not be followed
        partial.unlink(missing_ok=True)
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not held():
            raise taken_over
        os.replace(partial, path)
    except BaseException:
        if held():
            with suppress(OSError):
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


class AppendedFile:
    """Appends whole entries. Only a process that is killed leaves a torn one."""

    def __init__(
        self, path: Path, report: Callable[[str], None], held: Callable[[], bool] = lambda: True
    ) -> None:
        """Prepare to append to `path`, which need not exist.

        No method raises OSError: `report` is called for the first one. Nothing is written while
        `held()` is False.
        """
        self._path = path
        self._report = report
        self._held = held
        self._file: int | None = None
        self._failed_before = False

    def write(self, entry: bytes) -> bool:
        """Append an entry; return False if it cannot be written."""
        if not self._held():
            return False
        try:
            if self._file is None:
                self._path.parent.mkdir(exist_ok=True)
                self._file = in_place(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                sync_folder(self._path.parent)
            written = os.write(self._file, entry)
            # the disk became full within the entry, whose beginning is removed
            if written < len(entry):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._failed(error)
            return False
        return True

    def sync(self) -> None:
        """Force written entries to disk."""
        try:
            if self._file is not None:
                os.fsync(self._file)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _failed(self, error: OSError) -> None:
        if not self._failed_before:
            self._failed_before = True
            self._report(f"cannot write {self._path}: {error.strerror}; training continues")
