"""Files that are whole or absent, and files that grow by whole entries."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from hvd_train.run_files import durable
from hvd_train.run_files.durable import AppendedFile
from tests.support.faults import no_room

PATH = Path("file")


@pytest.mark.parametrize("name", ["file.partial", "file"])
def test_a_planted_link_is_replaced(name: str) -> None:
    Path("outside").write_text("precious")
    Path(name).symlink_to("outside")
    durable.write(PATH, b"data")
    assert Path("outside").read_text() == "precious"
    assert PATH.read_bytes() == b"data"
    assert not PATH.is_symlink()


def test_entries_are_appended_and_links_are_not_followed() -> None:
    PATH.write_text("before\n")
    file = AppendedFile(PATH, [].append)
    file.write(b"one\n")
    assert PATH.read_text() == "before\none\n"
    file.close()
    Path("link").symlink_to(PATH)
    lines = []
    planted = AppendedFile(Path("link"), lines.append)
    planted.write(b"two\n")
    planted.close()
    assert PATH.read_text() == "before\none\n"
    assert "cannot write link: Too many levels of symbolic links" in lines[0]


def test_what_does_not_fit_is_left_out_and_reported_once() -> None:
    """A reader never sees a part of a line."""
    lines = []
    file = AppendedFile(PATH, lines.append)
    write = os.write
    assert file.write(b"one\n")
    with no_room():
        assert not file.write(b"two\n")
        file.sync()
    with patch("os.write", lambda number, data: write(number, data[:2])):
        assert not file.write(b"three\n")
    assert PATH.read_text() == "one\n"
    assert file.write(b"four\n")
    file.close()
    assert PATH.read_text() == "one\nfour\n"
    assert lines == ["cannot write file: No space left on device; training continues"]
