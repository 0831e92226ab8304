"""Make output streams drop what they cannot write, so that threads that read from ranks keep running."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET)  # the pipe has no reader; the terminal is gone


class _Outliving(io.FileIO):
    """Write to a file descriptor; drop what cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.fileno())
                os.close(nothing)
            return memoryview(data).nbytes


def _outliving(stream: TextIO | None, number: int) -> TextIO:
    """Return a stream that writes to the same file, or drops all if there is none; else `stream` itself."""
    if stream is None:
        return open(os.devnull, "w")  # as long as the process lives
    raw = getattr(getattr(stream, "buffer", None), "raw", getattr(stream, "buffer", None))  # python -u has no buffer
    if type(stream) is not io.TextIOWrapper or type(raw) is not io.FileIO or stream.fileno() != number:
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    buffer = io.BufferedWriter(_Outliving(number, "wb", closefd=False))
    line_buffering, write_through = stream.line_buffering, stream.write_through
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, None, line_buffering, write_through)


def outlive() -> None:
    """Drop what this process prints after its console is gone, instead of raising OSError."""
    for number in range(3):  # the next file to be opened would get the number of a closed one (`>&-`)
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _outliving(sys.stdout, 1), _outliving(sys.stderr, 2)
