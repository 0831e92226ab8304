"""Reading a file of lines from its end."""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.errors import UsageError
from hvd_train.run_files import tail
from hvd_train.run_files.tail import lines_backwards


class Counting(io.BytesIO):
    """A file that counts the bytes which are read from it."""

    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


@given(content=st.lists(st.sampled_from([b"\n", b"x", b"yy", b"a line of some length", b"\r"])).map(b"".join))
@pytest.mark.parametrize("block", [1, 2, 7, 1 << 16])
def test_lines_come_backwards_with_their_offsets(content: bytes, block: int) -> None:
    """Whatever the size of lines and blocks; a last line without its end comes first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail, "_BLOCK", block)
        found = list(lines_backwards(io.BytesIO(content)))
    assert [line for _, line in reversed(found)] == io.BytesIO(content).readlines()
    assert all(content[offset:].startswith(line) for offset, line in found)


def test_no_more_is_read_than_asked_for() -> None:
    """The last lines of a file of 100 MB cost what those of a small one cost."""
    file = Counting(b"0123456789\n" * 10_000_000)
    assert len(list(islice(lines_backwards(file), 100))) == 100
    assert file.count <= 1 << 16


def test_a_line_that_is_none_of_ours_is_not_read_to_its_beginning(tmp_path: Path) -> None:
    """A sparse file takes no disk, and would take all memory."""
    with open(tmp_path / "metrics.jsonl", "w+b") as file:
        file.truncate(1 << 28)
        with pytest.raises(UsageError, match=r"^cannot go on with .*metrics\.jsonl: a line of it is longer than"):
            next(lines_backwards(file))
        assert file.tell() >= (1 << 28) - (1 << 25)
