"""Pickles between a program and its ranks: what cells define goes through, and nobody else's file is read."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from hvd_train.launch import own_pickle

CELL = """
class Rows:
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number
"""


def of_a_cell() -> Any:
    """An instance of a class that is in no module, as a notebook's are."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, cell)
    return cell["Rows"](7)


def test_functions_and_classes_of_cells_come_back() -> None:
    """With what they enclose; the file is this account's alone, and nothing else is left beside it."""
    number = 3
    own_pickle.write(Path("call"), (lambda more: number + more, of_a_cell()))
    function, rows = own_pickle.read(Path("call"))
    assert (function(4), len(rows)) == (7, 7)
    assert Path("call").stat().st_mode & 0o777 == 0o600
    assert os.listdir() == ["call"]


def test_what_cannot_be_pickled_leaves_no_file() -> None:
    """Nor half of one."""
    with pytest.raises(TypeError, match="generator"):
        own_pickle.write(Path("value"), [bytes(1 << 20), (number for number in range(3))])
    assert os.listdir() == []


def planted(name: str) -> Path:
    path = Path(name)
    if name == "pipe":
        os.mkfifo(path, 0o600)
        return path
    own_pickle.write(Path("file"), 1)
    if name == "link":
        path.symlink_to("file")
    elif name == "open":
        Path("file").rename(path)
        path.chmod(0o620)
    else:
        Path("file").rename(path)
        os.chown(path, 12345, -1)
    return path


@pytest.mark.parametrize(
    "name",
    ["pipe", "link", "open", pytest.param("strangers", marks=pytest.mark.skipif(os.geteuid() != 0, reason="root"))],
)
def test_a_file_that_others_may_have_written_is_not_read(name: str) -> None:
    """A link, a pipe that nobody writes into, and what another account owns or may write, at once."""
    with pytest.raises(OSError, match=r"account alone|symbolic links"):
        own_pickle.read(planted(name))


def test_loader_processes_are_sent_what_cells_define(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself multiprocessing would send the name of a class that the other process does not have."""
    monkeypatch.setattr(own_pickle.reduction, "dump", own_pickle.reduction.dump)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        own_pickle.reduction.dump(of_a_cell(), io.BytesIO())
    own_pickle.send_by_value()
    sent = io.BytesIO()
    own_pickle.reduction.dump(of_a_cell(), sent)
    assert len(pickle.loads(sent.getvalue())) == 7
