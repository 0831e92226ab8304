"""A full disk: as an error of system calls, and as a small disk that can be filled."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest


@contextmanager
def no_room() -> Iterator[None]:
    """Let this process create files, but write no further byte into them."""
    fits = os.write

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(file: int, data: bytes) -> int:
        return fits(file, data) if os.fstat(file).st_nlink == 0 else full()  # pipes of Python's own

    with patch("os.write", write), patch("os.fsync", full):
        yield


@contextmanager
def small_disk(folder: Path, megabytes: int = 2) -> Iterator[Path]:
    """Mount a file system of this size at `folder`; needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("ab", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while file.write(bytes(4096)):
            pass


def empty(disk: Path) -> None:
    (disk / "ballast").unlink()
