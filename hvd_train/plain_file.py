"""Files that somebody else may have planted: opened where they are plain ones, else an OSError that says what they are.

A run folder may be anybody's. What has the name of a file in it can be a pipe that nobody writes into, a device
without an end, a link to somewhere else, or a file that is larger than the memory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_MOST_BYTES = 2**30  # of a file that is read whole, unless the caller knows better
LONGEST_LINE = 2**24
_IS_NONE = "it is no file, but a pipe or a device"


def in_place(path: str | Path, flags: int) -> int:
    """Open a file of a run folder itself, to be written where it stands; this is an `opener` for `open`.

    Raises OSError where the name is a link, the file has other names, or it is no file: whoever has planted that means
    another file outside of the folder. It is never emptied here: leave O_TRUNC out.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.ELOOP, "it is no file of its own, but a link or a device", str(path))


def opened(path: str | Path) -> BinaryIO:
    """Open a file to be read; a link to a file is followed. Raises OSError, at once, where it is a pipe or a device."""
    return open(path, "rb", opener=_to_read)


def read_bytes(path: str | Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return all that the file held when it was opened. Raises OSError where that is more than `most_bytes`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", str(path))
        return file.read(size)  # no more, for a file of /proc may say 0 and have no end


def read_text(path: str | Path, most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of a file in UTF-8, as `read_bytes` does. Raises ValueError where it is none."""
    return read_bytes(path, most_bytes).decode()


def lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, each with its line end. Raises OSError where one is longer than any of ours."""
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise OSError(errno.EFBIG, f"a line of it is longer than {LONGEST_LINE:,} bytes", str(file.name))
        yield line


def _to_read(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, _IS_NONE, path)
