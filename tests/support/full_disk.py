"""A disk without room: as an error of the system calls that write, and as a small disk that can be filled."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def no_room() -> Iterator[None]:
    """Inside this block this process can begin files, but has no room for a further byte in them."""
    fits: Callable[..., int] = os.write

    def write(file: int, data: bytes) -> int:
        if os.fstat(file).st_nlink == 0:  # pipes of Python's own
            return fits(file, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fsync(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        patch.setattr(os, "fsync", fsync)
        yield


@contextmanager
def small_disk(folder: Path, megabytes: int = 2) -> Iterator[Path]:
    """Mount a file system of this size at `folder`, which takes root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Leave no room on a disk of `small_disk`."""
    with (disk / "ballast").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def empty(disk: Path) -> None:
    """Give back the room that `fill` has taken."""
    (disk / "ballast").unlink()
