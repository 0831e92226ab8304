"""The program's name, the one printer of lines about the program itself, and a console that may go away."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO

PROGRAM = "hvd-train"
# C0, DEL, C1, and the signs that turn the direction of writing or end lines: they act on a terminal, or forge a line.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET)  # no process reads the pipe; the terminal is gone


def say(message: str) -> None:
    """Print one line, `hvd-train: message`, to standard error at once."""
    print(f"{PROGRAM}: {printable(message, keep=_LAYOUT)}", file=sys.stderr, flush=True)


_LAYOUT = "\n\t"


def printable(text: object, keep: str = "") -> str:
    """Return text of a file or a name, with U+FFFD in the place of each sign that a terminal would obey.

    Those in `keep` are left: the line ends of a text that has several lines.
    """
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else "\N{REPLACEMENT CHARACTER}", str(text))


def show(text: object) -> None:
    """Print lines to standard output at once, as `printable` makes them: a launcher's pipe would hold them back."""
    print(printable(text, keep=_LAYOUT), flush=True)


def outlive() -> None:
    """Discard the output of this process if its console is gone, instead of raising OSError.

    This holds for print, warnings, logging and progress bars, and for native code and child processes that start later.
    Output that a full disk does not take is dropped. Streams that are not files of the system, as in a notebook, stay
    as they are. A second call changes nothing.
    """
    for number in range(3):  # one that was closed (`>&-`) would soon be the number of a file that is written to
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _outliving(sys.stdout, 1)
    sys.stderr = _outliving(sys.stderr, 2)


def _outliving(stream: TextIO | None, number: int) -> TextIO:
    """Return a stream that discards what `stream` cannot write, or `stream` itself if it is no file of the system."""
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
        "backslashreplace",  # a name that an ASCII console cannot show ends nothing
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Outliving(io.FileIO):
    """Writes to a file descriptor, and discards what it cannot write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.fileno())
                os.close(nothing)
            return memoryview(data).nbytes
