"""`hvd-train bench`: which tool runs, and what is refused before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import cli


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "usage: hvd-train bench"),
        ("troughput", "did you mean 'throughput'"),
        ("throughput --steps 0", "--steps 0"),
        ("throughput --stepz 3", "unknown argument '--stepz'"),
        ("input --seconds x", "--seconds x"),
        ("input --json", "--json needs"),
        ("batch --from 0", "--from 0"),
        ("batch --form 2", "unknown argument '--form'"),
        ("batch --json gone/record.json", "there is no folder gone"),
        ("batch --json two", "is no record of `hvd-train bench batch`"),
        ("batch --plot two", "must end in .png or .svg"),
        ("allreduce", "horovodrun -np 2"),
        ("allreduce --repetitions 0", "--repetitions 0"),
        ("scaling", "--np 1,2,4"),
        ("scaling --np 1,0", "--np 1,0"),
        ("scaling --np 2,2", "twice"),
        ("scaling --np 1 --mode fast", "weak or strong"),
        ("scaling --np 1 --controller nccl", "gloo or mpi"),
        ("scaling --np 1 --hosts none", "none"),
        ("scaling --np 1,3 --hosts two", "--np 3 needs"),
        ("scaling --np 1 --output-dir two", "two is a file"),
        ("scaling --np 1 --output-dir theirs", "theirs/scaling.json"),
        ("scaling --np 1 --model digits-convnett", "digits-convnet"),
    ],
)
def test_what_cannot_be_measured(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with what is wrong, code 2, and nothing is there that was not before."""
    Path("two").write_text("a slots=1\nb slots=1\n")
    Path("theirs").mkdir()
    Path("theirs/scaling.json").write_text("{}")
    assert cli.run(["bench", *line.split()]) == 2
    told = capsys.readouterr()
    assert words in told.out + told.err
    assert len(told.err.splitlines()) == (1 if line else 0)
    assert sorted(str(path) for path in Path().rglob("*")) == ["theirs", "theirs/scaling.json", "two"]


def test_workers_that_come_and_go_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An elastic job is refused: there is no one number of workers to speak of."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert cli.run(["bench", "throughput"]) == 2
    assert "without --min-np" in capsys.readouterr().err
