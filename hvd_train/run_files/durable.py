"""Files that are whole or absent, even where the process is killed or the disk fills up while they are written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL_SUFFIX = ".partial"

Permission = Callable[[], bool]
"""Says whether this process may write (still): another one may have taken over what it writes into."""


def always() -> bool:
    """Give permission: nobody else writes there."""
    return True


@contextmanager
def writing(path: Path, permission: Permission = always) -> Iterator[BinaryIO]:
    """Open a file beside `path` for the block, then force it to disk and rename it to `path`.

    Whoever reads `path` sees the old content or the new one, never a part. Raises OSError (disk full, or where
    `permission`, which is asked at the beginning and again before the file gets its name, says no) and removes the
    unfinished file then; whatever else the block raises passes through in the same way.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    _ask(permission, path)
    try:
        partial.unlink(missing_ok=True)  # a killed process left it; or it is a link, which is removed and not followed
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _ask(permission, path)
        os.replace(partial, path)
    except BaseException:
        if permission():  # else it may be the unfinished file of the process that has taken over
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write(path: Path, content: bytes, permission: Permission = always) -> None:
    """Write a whole file, as `writing` does. Raises OSError."""
    with writing(path, permission) as file:
        file.write(content)


def write_text(path: Path, text: str, permission: Permission = always) -> None:
    """Write a whole file in UTF-8, as `writing` does. Raises OSError."""
    write(path, text.encode(), permission)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk: only then does a rename outlive a power failure. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ask(permission: Permission, path: Path) -> None:
    if not permission():
        raise OSError(errno.EPERM, "another process has taken over the folder", str(path))


def remove_partial(folder: Path) -> None:
    """Remove the unfinished files that killed processes left in a folder. Raises OSError."""
    for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
        leftover.unlink(missing_ok=True)
