"""Print lines of the program, without control characters, even after the console is gone."""

import io
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO

PROGRAM = "hvd-train"
# C0, DEL, C1, and characters that change the text direction or end lines: they act on a terminal or
# forge a line.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_LAYOUT = "\n\t"
failed: list[OSError] = []  # why the last line was dropped, if one was


def say(message: str) -> None:
    """Print one line, `hvd-train: message`, to standard error at once."""
    print(f"{PROGRAM}: {printable(message, keep=_LAYOUT)}", file=sys.stderr, flush=True)


def printable(text: object, keep: str = "") -> str:
    """Return the text with U+FFFD in place of each control character that is not in `keep`."""
    return _CONTROL.sub(
        lambda found: found[0] if found[0] in keep else "\N{REPLACEMENT CHARACTER}", str(text)
    )


def reasons(output: str) -> list[str]:
    """Return the errors in the output of other processes, the first one first."""
    return re.findall(r"(?:hvd-train: |\b(?=stopped by |[\w.]*(?:Error|Exception): ))(.*)", output)


def show(text: object) -> None:
    """Print lines to standard output and flush it, since a launcher's pipe is buffered."""
    print(printable(text, keep=_LAYOUT), flush=True)


def outlive() -> None:
    """Print each line at once and in one piece; drop it if the console is gone or its disk is full.

    Streams that are no files, as in a notebook, stay as they are. A second call changes nothing.
    """
    # the next file to be opened would get the number of a closed one (`>&-`)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _outliving(sys.stdout, 1)
    sys.stderr = _outliving(sys.stderr, 2)


def _outliving(stream: TextIO | None, number: int) -> TextIO:
    """Return a stream that writes to the same file and drops what cannot be written, or
    `stream` if it is no file.
    """
    if stream is None:
        return open(os.devnull, "w")  # as long as the process lives
    if getattr(stream, "name", "") not in ("<stdout>", "<stderr>"):
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outliving(number, "wb", closefd=False)),
        stream.encoding,
        "backslashreplace",  # an ASCII console may have to show any name
        # with PYTHONUNBUFFERED, print() writes a line in pieces: mpirun puts a rank before each
        line_buffering=True,
    )


class _Outliving(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            failed[:] = [error]
            return memoryview(data).nbytes
