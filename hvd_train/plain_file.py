"""Open regular files only; raise OSError for FIFOs, devices and symlinks, which another
user's run folder may hold.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 2**30  # of a file that is read whole


def in_place(path: str | Path, flags: int) -> int:
    """Open a file of a run folder for writing in place, as an `opener` for
    `open`; leave O_TRUNC out.

    Raises OSError for a symlink, a file with other hard links, or no regular file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.ELOOP, "it is a hard link or a device, not a file of its own", str(path))


def opened(path: str | Path, *, follows: bool = True) -> BinaryIO:
    """Open a file for reading.

    Raises OSError if it is a pipe or a device, or a symlink that is not followed.
    """
    return open(path, "rb", opener=_to_read if follows else _to_read_itself)


def read_bytes(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return what the file held when it was opened.

    Raises OSError if that is more than `most_bytes`.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size  # a file of /proc may say 0 and have no end
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", str(path))
        return file.read(size)


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file in UTF-8, as `read_bytes` does.

    Raises ValueError if it is no text.
    """
    return read_bytes(path, most_bytes).decode()


def _to_read_itself(path: str, flags: int) -> int:
    return _to_read(path, flags | os.O_NOFOLLOW)


def _to_read(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` refuses a folder
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no file, but a pipe or a device", path)
