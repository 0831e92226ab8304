"""A file that grows: entries are whole or absent, and nothing is lost while a disk is full."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from hvd_train.run_files import appended_file
from hvd_train.run_files.appended_file import AppendedFile
from tests.support.full_disk import no_room

PATH = Path("file")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try the disk again with every entry."""
    monkeypatch.setattr(appended_file, "_AGAIN_S", 0.0)


def test_entries_are_appended_to_what_is_there() -> None:
    """Each is in the file at once, for those who watch."""
    PATH.write_text("before\n")
    file = AppendedFile(PATH, [].append)
    file.write(b"one\n")
    assert PATH.read_text() == "before\none\n"
    file.close()


def test_a_new_file_outlives_a_power_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is forced to disk when it is made, and what is in it when that is asked for."""
    forced: list[bool] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        forced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    file = AppendedFile(PATH, [].append)
    file.write(b"one\n")
    file.sync()
    file.write(b"two\n")
    file.close()
    assert forced == [True, False]


def test_what_does_not_fit_is_written_later_and_told_once() -> None:
    """In its order, before what comes then."""
    told: list[str] = []
    file = AppendedFile(PATH, told.append)
    file.write(b"one\n")
    with no_room():
        file.write(b"two\n")
        file.write(b"three\n")
        file.sync()
    file.write(b"four\n")
    file.close()
    assert PATH.read_text() == "one\ntwo\nthree\nfour\n"
    assert told == ["cannot write file: No space left on device; what belongs there is kept until it fits"]


def test_an_entry_that_fits_by_half_is_taken_back() -> None:
    """A reader never sees a part of a line, and the file goes on after the last whole one."""
    file, write = AppendedFile(PATH, [].append), os.write
    file.write(b"one\n")
    with no_room():
        file.write(b"two\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda number, data: write(number, data[:6]))
        file.write(b"three\n")  # of both lines six bytes fit
    assert PATH.read_text() == "one\ntwo\n"
    file.close()
    assert PATH.read_text() == "one\ntwo\nthree\n"


def test_an_entry_is_taken_back_while_it_waits() -> None:
    """Only the newest one, and none that is in the file; what is taken back is not missing at the end."""
    told: list[str] = []
    file = AppendedFile(PATH, told.append, most_bytes=12)
    file.write(b"one\n")
    assert not file.take_back()
    with no_room():
        file.write(b"two\n")
        file.write(b"three\n")
        assert file.take_back()
        file.write(b"four\n")  # would not fit into memory beside what was taken back
    file.close()
    assert PATH.read_text() == "one\ntwo\nfour\n"
    assert len(told) == 1


def test_a_disk_that_is_full_is_not_tried_with_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try writes all that is waiting: a step must not take longer the longer the disk is full."""
    monkeypatch.setattr(appended_file, "_AGAIN_S", 60.0)
    file = AppendedFile(PATH, [].append)
    with no_room():
        file.write(b"one\n")
    file.write(b"two\n")
    assert PATH.read_text() == ""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    file.write(b"three\n")
    file.close()
    assert PATH.read_text() == "one\ntwo\nthree\n"


def test_memory_has_an_end_and_the_oldest_entries_go_first() -> None:
    """They are counted at the end; so are those that never fitted."""
    told: list[str] = []
    file = AppendedFile(PATH, told.append, most_bytes=10)
    with no_room():
        for entry in (b"1234\n", b"2234\n", b"3234\n", b"4234\n"):
            file.write(entry)
        file.close()
    assert PATH.read_text() == ""
    assert told[1:] == [
        "file: too much is waiting for the disk, the oldest of it is lost",
        "file lacks 4 entries, which could not be written",
    ]


def test_a_planted_link_is_not_appended_to() -> None:
    """It is told as a disk that does not take what belongs there, and the file that it leads to stays as it is."""
    Path("outside").write_text("precious")
    PATH.symlink_to("outside")
    told: list[str] = []
    file = AppendedFile(PATH, told.append)
    file.write(b"one\n")
    file.close()
    assert Path("outside").read_text() == "precious"
    assert "cannot write file: it is a link, which is not followed" in told[0]
