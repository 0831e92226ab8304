"""Files that are whole or absent, and files that grow by whole entries."""

import os
from pathlib import Path

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
    lines: list[str] = []
    planted = AppendedFile(Path("link"), lines.append)
    planted.write(b"two\n")
    planted.close()
    assert PATH.read_text() == "before\none\n"
    assert "cannot write link: it is a symlink, which is not followed" in lines[0]


def test_what_does_not_fit_is_written_later_in_order_and_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader never sees a part of a line."""
    monkeypatch.setattr(durable, "_AGAIN_S", 0.0)
    lines: list[str] = []
    file, write = AppendedFile(PATH, lines.append), os.write
    file.write(b"one\n")
    with no_room():
        file.write(b"two\n")
        file.sync()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda number, data: write(number, data[:6]))
        file.write(b"three\n")  # of both lines six bytes fit
    assert PATH.read_text() == "one\ntwo\n"
    file.write(b"four\n")
    file.close()
    assert PATH.read_text() == "one\ntwo\nthree\nfour\n"
    assert lines == ["cannot write file: No space left on device; what belongs there is kept until it fits"]


def test_memory_has_an_end_and_the_oldest_entries_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_AGAIN_S", 0.0)
    monkeypatch.setattr(durable, "_MOST_BYTES", 10)
    lines: list[str] = []
    file = AppendedFile(PATH, lines.append)
    with no_room():
        for entry in (b"1234\n", b"2234\n", b"3234\n"):
            file.write(entry)
    file.write(b"4234\n")
    file.close()
    assert PATH.read_text() == "3234\n4234\n"
    assert lines[1:] == ["file lacks 2 entries, which could not be written"]
