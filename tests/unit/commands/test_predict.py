"""`hvd-train predict`: which images, and how what is said about them is shown."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hvd_train import cli
from hvd_train.predict import Prediction

SAID = (
    Prediction("a.png", None, (("cat", 0.75), ("dog", 0.25))),
    Prediction("b\x1b.png", "dog, small", (("cat", 0.5), ("dog, small", 0.5))),
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the models are asked; the answer is always SAID."""
    asked: list[Any] = []

    def of_files(target: Path, files: list[Path], **options: Any) -> Any:
        asked.append((target, files, options["top"]))
        return iter(SAID)

    def of_split(target: Path, split: str, **options: Any) -> Any:
        asked.append((target, split, options["top"]))
        return iter(SAID)

    monkeypatch.setattr("hvd_train.predict.of_files", of_files)
    monkeypatch.setattr("hvd_train.predict.of_split", of_split)
    return asked


def test_a_line_for_each_image(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Best first, and what the image is, where that is known; a file's name cannot act on the terminal."""
    Path("a.png").touch()
    assert cli.run(["predict", "run", "a.png", "--top", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a.png: cat 75.00%, dog 25.00%",
        "b\ufffd.png (is dog, small): cat 50.00%, dog, small 50.00%",
    ]
    assert calls == [(Path("run"), [Path("a.png")], 2)]


def test_objects_for_programs(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """One a line."""
    assert cli.run(["predict", "run", "--split", "test", "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {"image": "a.png", "truth": None, "best": [["cat", 0.75], ["dog", 0.25]]}
    assert second["truth"] == "dog, small"
    assert calls == [(Path("run"), "test", 5)]


def test_a_table_of_a_whole_set(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each image; a file that is there is not replaced."""
    assert cli.run(["predict", "run", "--split", "val", "--output", "out.csv"]) == 0
    assert capsys.readouterr().out == "out.csv\n"
    with open("out.csv", newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert head == ["image", "truth", "class1", "probability1", "class2", "probability2"]
    assert rows[1] == ["b\x1b.png", "dog, small", "cat", "0.5", "dog, small", "0.5"]
    assert cli.run(["predict", "run", "--split", "val", "--output", "out.csv"]) == 2
    assert "out.csv exists" in capsys.readouterr().err
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "which images? name files or folders"),
        (["a.png", "--split", "val"], "which images? name files or folders"),
        (["gone.png"], "gone.png: no such image or folder"),
        (["--split", "val", "--top", "0"], "--top 0: it must be at least 1"),
        (["--split", "val", "--json", "--output", "x.csv"], "leave out one of them"),
        (["--split", "val", "--output", "no/x.csv"], "no folder no"),
        (["--split", "all"], "all"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], message: str, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2, before a model is loaded."""
    assert cli.run(["predict", "run", *flags]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert calls == []


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each would print all of it."""
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    assert cli.run(["predict", "run", "--split", "val"]) == 2
    assert "type it without a launcher" in capsys.readouterr().err
