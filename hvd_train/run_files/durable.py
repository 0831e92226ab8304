"""Files that are either wholly there or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL_SUFFIX = ".partial"


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file under a name of its own, forced to disk and renamed after the block: `path` is the old or the new whole.

    Raises OSError (disk full, no permission) and leaves nothing behind then.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write(path: Path, content: bytes) -> None:
    """Write `content` as in `writing`. Raises OSError."""
    with writing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """`write` for text, in UTF-8."""
    write(path, text.encode())


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk: a rename is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(folder: Path) -> None:
    """Remove what a killed process was writing."""
    leftovers: Iterable[Path] = folder.glob(f"*{PARTIAL_SUFFIX}")
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
