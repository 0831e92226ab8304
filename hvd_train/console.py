"""The program's name, the one printer of lines about the program itself, and a console that may go away."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

PROGRAM = "hvd-train"
_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET)  # nobody reads the pipe; the terminal is gone


def say(message: str) -> None:
    """Print one line, `hvd-train: message`, to standard error at once."""
    print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)


def outlive() -> None:
    """Let what this process prints from here on vanish where its console is gone, instead of raising OSError.

    That is so for print, warnings, logging and progress bars, of libraries and of the user's own code. Where nobody
    reads the pipe any more, or the terminal is gone, native code and child processes started later write into nothing,
    too; what a full disk does not take is dropped. Streams that are not files of the system, as in a notebook, are left
    alone, and a second call changes nothing.
    """
    for number in range(3):  # one that was closed (`>&-`) would soon be the number of a file that is written to
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _outliving(sys.stdout, 1)
    sys.stderr = _outliving(sys.stderr, 2)


def _outliving(stream: TextIO | None, number: int) -> TextIO:
    """Return a stream that writes where `stream` does, or into nothing where there is none; else `stream` itself."""
    if stream is None:
        return open(os.devnull, "w")  # as long as the process lives
    raw = getattr(getattr(stream, "buffer", None), "raw", getattr(stream, "buffer", None))
    if type(stream) is not io.TextIOWrapper or type(raw) is not io.FileIO or stream.fileno() != number:
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outliving(number, "wb", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Outliving(io.FileIO):
    """Writes to a file descriptor, and takes for written what cannot be."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.fileno())
                os.close(nothing)
            return memoryview(data).nbytes
