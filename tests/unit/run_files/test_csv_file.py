"""metrics.csv: its columns, its rows, and how it goes back with a run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hvd_train.run_files import appended_file
from hvd_train.run_files.csv_file import CsvFile
from hvd_train.run_files.records import Numbers
from tests.support.full_disk import no_room

TABLE = Path("metrics.csv")


def numbers(step: int, kind: str = "step", epoch: int | None = 1, **values: float) -> Numbers:
    """Return numbers of a step; `_` in a name stands for `/`."""
    return Numbers(kind, step, epoch, 1e9, {name.replace("_", "/"): value for name, value in values.items()})


def rows() -> list[dict[str, str]]:
    """Return the table as a reader has it, which goes by names."""
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def written(
    *several: Numbers, resumed: int = 0, epochs_done: int = 0, names: tuple[str, ...] = ("train/loss",)
) -> None:
    """Write numbers as a run that goes on after step `resumed`, in which these names are to be expected."""
    table = CsvFile(TABLE, resumed, epochs_done, [].append)
    table.begin(names)
    for one in several:
        table.add(one)
    table.close(None)


def test_each_record_is_a_row() -> None:
    """What a record does not have is an empty cell; NaN and infinity are written as Python and pandas read them."""
    table = numbers(1, train_loss=0.1 + 0.2), numbers(2, train_loss=float("nan")), numbers(2, "world", None, a=1.0)
    written(*table, numbers(2, "epoch", val_loss=float("inf")), names=("train/loss", "val/loss", "a"))
    assert [row["kind"] for row in rows()] == ["step", "step", "world", "epoch"]
    assert [row["train/loss"] for row in rows()] == ["0.30000000000000004", "nan", "", ""]
    assert [row["val/loss"] for row in rows()] == ["", "", "", "inf"]
    assert [row["epoch"] for row in rows()] == ["1", "1", "", "1"]


def test_columns_keep_their_places() -> None:
    """All are there from the start, also those of an evaluation to come; later ones come behind them."""
    written(numbers(1, train_loss=1.0), names=("train/loss", "val/loss"))
    assert TABLE.read_text().splitlines()[0] == "kind,step,epoch,time,train/loss,val/loss"
    written(numbers(2, new=2.0), resumed=1, names=("new", "train/loss"))
    assert TABLE.read_text().splitlines()[0] == "kind,step,epoch,time,train/loss,val/loss,new"
    assert [(row["step"], row["train/loss"], row["new"]) for row in rows()] == [("1", "1.0", None), ("2", "", "2.0")]


def test_rows_of_what_did_not_happen_go() -> None:
    """The steps after the one resumed, an epoch that ends again, and a row that was torn by a kill."""
    steps = [numbers(step, train_loss=1.0) for step in (1, 2, 3)]
    written(*steps[:2], numbers(2, "epoch", val_loss=1.0), steps[2], names=("train/loss", "val/loss"))
    with TABLE.open("a") as file:
        file.write("step,2,1,10")
    written(numbers(3, train_loss=2.0), resumed=2, epochs_done=0)
    assert [(row["kind"], row["step"], row["train/loss"]) for row in rows()] == [
        ("step", "1", "1.0"),
        ("step", "2", "1.0"),
        ("step", "3", "2.0"),
    ]


def test_an_epoch_that_is_done_stays() -> None:
    """Its row is of a step that did happen."""
    written(numbers(2, train_loss=1.0), numbers(2, "epoch", val_loss=1.0), names=("train/loss", "val/loss"))
    written(resumed=2, epochs_done=1)
    assert [row["kind"] for row in rows()] == ["step", "epoch"]


def test_a_full_disk_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the header either: all is written when it fits."""
    monkeypatch.setattr(appended_file, "_AGAIN_S", 0.0)
    table = CsvFile(TABLE, 0, 0, [].append)
    with no_room():
        table.begin(["train/loss"])
        table.add(numbers(1, train_loss=1.0))
    table.add(numbers(2, train_loss=2.0))
    table.close(None)
    assert [row["train/loss"] for row in rows()] == ["1.0", "2.0"]


def test_nothing_is_written_without_permission() -> None:
    """Another process has taken over the folder: neither rows nor columns are written by this one."""
    written(numbers(1, train_loss=1.0))
    before = TABLE.read_bytes()
    table = CsvFile(TABLE, 1, 0, [].append, lambda: False)
    table.begin(["new"])
    table.add(numbers(2, train_loss=1.0))
    table.close(None)
    assert TABLE.read_bytes() == before
