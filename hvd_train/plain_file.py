"""Open regular files only; raise OSError for FIFOs, devices and symlinks, which another user's run folder may hold."""

import errno
import math
import os
import stat
from functools import partial
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 2**30  # of a file that is read whole


def in_place(path: str | Path, flags: int) -> int:
    """Open a file of a run folder for writing in place, as an `opener` for `open`; leave O_TRUNC out.

    Raises OSError for a symlink, a file with other hard links, or no regular file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.ELOOP, "it is a hard link or a device, not a file of its own", str(path))


def opened(path: str | Path, most_bytes: float = math.inf) -> BinaryIO:
    """Open a file for reading; follow a symlink to a file. Raises OSError if it is a pipe, a device or too large."""
    return open(path, "rb", opener=partial(_to_read, most_bytes))


def read_bytes(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return what the file held when it was opened. Raises OSError if that is more than `most_bytes`."""
    with opened(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)  # a file of /proc may say 0 and have no end


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file in UTF-8, as `read_bytes` does. Raises ValueError if it is no text."""
    return read_bytes(path, most_bytes).decode()


def _to_read(most_bytes: float, path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)  # `open` refuses a folder
    if is_plain and status.st_size <= most_bytes:
        return descriptor
    os.close(descriptor)
    if is_plain:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", path)
    raise OSError(errno.EINVAL, "it is no file, but a pipe or a device", path)
