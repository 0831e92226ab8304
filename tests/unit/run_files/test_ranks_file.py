"""The file that names the processes of a run's ranks: what is written is read, and nothing else is believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train.launch.seat import Process, Seat
from hvd_train.run_files import ranks_file

SEATS = [Seat(Process("h1", 12, 99), "h1", Process("h1", 5, 90)), Seat(Process("h2", 12, 98), "10.0.0.2")]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """In the order of ranks, and in the place of what an earlier world has written."""
    ranks_file.write(tmp_path, SEATS[:1])
    ranks_file.write(tmp_path, SEATS)
    assert ranks_file.read(tmp_path) == SEATS


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    """A run of an earlier version has none, and a disk that takes nothing ends no training."""
    assert ranks_file.read(tmp_path) == []
    ranks_file.write(tmp_path / "gone", SEATS)


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """Whoever planted it means another file."""
    (tmp_path / "other").write_text("mine")
    (tmp_path / ranks_file.NAME).symlink_to(tmp_path / "other")
    ranks_file.write(tmp_path, SEATS)
    assert (tmp_path / "other").read_text() == "mine"
    assert ranks_file.read(tmp_path) == SEATS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("address", "-oProxyCommand=touch x"),
        ("address", "h1; rm"),
        ("address", None),
        ("process", 3),
        ("process", None),
    ],
)
def test_what_cannot_be_is_refused(name: str, value: object, tmp_path: Path) -> None:
    """A run folder may be anybody's, and ssh would take a name that begins with - as an option."""
    ranks_file.write(tmp_path, SEATS)
    entries = json.loads((tmp_path / ranks_file.NAME).read_text())
    entries[1][name] = value
    (tmp_path / ranks_file.NAME).write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"host|TypeError"):
        ranks_file.read(tmp_path)


@pytest.mark.parametrize("number", [0, -1, True, "7", 1.5])
def test_a_number_of_a_process_that_is_none(number: object, tmp_path: Path) -> None:
    """A signal to process 0 or -1 would come to many."""
    ranks_file.write(tmp_path, SEATS)
    entries = json.loads((tmp_path / ranks_file.NAME).read_text())
    entries[0]["process"]["number"] = number
    (tmp_path / ranks_file.NAME).write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="process"):
        ranks_file.read(tmp_path)
