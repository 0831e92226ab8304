"""The end of a file of lines: read backwards, so that it costs the same however long the file has grown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

from hvd_train.errors import UsageError
from hvd_train.plain_file import LONGEST_LINE

_BLOCK = 1 << 16


def lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file from the last one on, each with its line end and with the offset where it begins.

    What stands after the last line end comes first, without one: a process was killed while it wrote the line. Of the
    file no more is read than what has been asked for, rounded up to blocks.

    Raises:
        OSError: if the file cannot be read.
        UsageError: if a line is longer than 16 MB, as in a sparse file that another user has planted.
    """
    begin = file.seek(0, os.SEEK_END)
    data, end = b"", 0  # what has been read from `begin` on; how much of it is not yielded yet
    while begin or end:
        line_end = data.rfind(b"\n", 0, max(0, end - 1))
        if line_end < 0 and begin:
            if end >= LONGEST_LINE:
                raise UsageError(f"{file.name} has a line of more than {LONGEST_LINE >> 20} MB: not a file of a run")
            # As much again as there is, so that a long line is not copied once for each block of it.
            block = min(begin, max(_BLOCK, end))
            begin = file.seek(begin - block)
            data = file.read(block) + data[:end]
            end += block
            continue
        yield begin + line_end + 1, data[line_end + 1 : end]
        end = line_end + 1
