"""Read the lines of a file backwards."""

import os
from collections.abc import Iterator
from typing import BinaryIO

from hvd_train.errors import UsageError
from hvd_train.plain_file import LONGEST_LINE

_BLOCK = 1 << 16


def lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield offset and text of each line, the last one first.

    A torn last line has no line end. Raises OSError, and UsageError if a line is longer than 16 MB (a sparse file).
    """
    begin = file.seek(0, os.SEEK_END)
    data, end = b"", 0  # the bytes since `begin`, and how many of them are not yielded yet
    while begin or end:
        line_end = data.rfind(b"\n", 0, max(0, end - 1))
        if line_end < 0 and begin:
            if end >= LONGEST_LINE:
                raise UsageError(f"{file.name} has a line of more than {LONGEST_LINE >> 20} MB: not a file of a run")
            block = min(begin, max(_BLOCK, end))  # doubles, so that a long line is not copied once a block
            begin = file.seek(begin - block)
            data = file.read(block) + data[:end]
            end += block
            continue
        yield begin + line_end + 1, data[line_end + 1 : end]
        end = line_end + 1
