"""Write files that are whole or absent after a kill or on a full disk."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

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
