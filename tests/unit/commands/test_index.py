"""`hvd-train index`: indexes beside shards, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_train import cli
from hvd_train.data import shard_index
from tests.support import shards

SAMPLE = [("a.jpg", b"x"), ("a.cls", b"1")]


def test_each_shard_gets_an_index_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a folder, whether by splits or not, and those that are named; one that fits stays as it is."""
    for path in ("data/train/0.tar", "data/val-1.tar", "plain/x.tar", "single.tar"):
        shards.write(Path(path), SAMPLE)
    line = ["index", "data", "plain", "single.tar"]
    assert cli.run(line) == 0
    assert capsys.readouterr() == ("4 shards with 4 images are indexed\n", "")
    indexes = sorted(Path().rglob("*.index"))
    assert len(indexes) == 4
    first = [path.stat().st_ino for path in indexes]
    os.utime("single.tar", ns=(5, 5))
    assert cli.run(line) == 0
    assert [path.stat().st_ino == before for path, before in zip(indexes, first, strict=True)] == [True] * 3 + [False]
    assert len(shard_index.read(Path("single.tar"))) == 1
    assert not [*Path().rglob("*.partial")]


def test_all_shards_are_tried_and_each_refusal_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Others get their index; the exit code is 2."""
    shards.write(Path("data/0.tar"), SAMPLE)
    shards.write(Path("data/1.tar"), SAMPLE[:1])
    Path("data/2.tar").write_bytes(b"no tar")
    assert cli.run(["index", "data"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "hvd-train: the shard data/1.tar cannot be used: a has no label, neither a .cls nor a .json",
        "hvd-train: the shard data/2.tar cannot be used: it is cut off: it has no end of an archive",
        "hvd-train: 2 of 3 shards have no index: mend or remove them",
    ]
    assert [path.name for path in Path("data").glob("*.index")] == ["0.tar.index"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "index needs the folder of the shards: type `hvd-train index DATA`"),
        (["empty"], "empty holds no shards"),
        (["gone.tar"], "cannot read the shard gone.tar: No such file"),
    ],
)
def test_what_cannot_be_indexed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, exit code 2."""
    Path("empty").mkdir()
    assert cli.run(["index", *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[0]


def test_a_folder_that_takes_no_index(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is one line, and nothing is left behind."""
    shards.write(Path("a.tar"), SAMPLE)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert cli.run(["index", "a.tar"]) == 2
    assert capsys.readouterr().err.startswith(
        "hvd-train: cannot write the index a.tar.index: No space left on device\n"
    )
    assert os.listdir() == ["a.tar"]
