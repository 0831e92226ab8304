"""`hvd-train evaluate`: the scores of a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train import cli
from hvd_train.validate import Scores


def test_train_and_evaluate_agree_to_the_last_digit(capsys: pytest.CaptureFixture[str]) -> None:
    """The scores in summary.json are those that `evaluate` gives later, of the run and of its checkpoint."""
    flags = ["--epochs", "1", "--device", "cpu", "--output-dir", "out", "--learning-rate", "0.01"]
    assert cli.run(["train", "digits", *flags]) == 0
    assert "next:  hvd-train evaluate out" in capsys.readouterr().out
    summary = json.loads(Path("out/summary.json").read_text())
    assert cli.run(["evaluate", "out", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert (scores["loss"], scores["top1"], scores["top5"]) == (summary["loss"], summary["top1"], summary["top5"])
    assert (scores["count"], len(scores["per_class"])) == (360, 10)
    checkpoint = max(Path("out/checkpoints").glob("*.ckpt"))
    assert cli.run(["evaluate", str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == scores
    assert cli.run(["evaluate", "gone"]) == 2
    assert capsys.readouterr().err == "hvd-train: gone: no such run folder or checkpoint\n"


def test_a_class_folder_cannot_act_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name has one line, whatever signs it is made of."""
    scores = Scores(loss=1.0, top1=0.5, top5=1.0, count=2, classes=("a\x1b[2J\nb",), per_class=(0.5,))
    monkeypatch.setattr("hvd_train.run.evaluate", lambda *_, **__: scores)
    assert cli.run(["evaluate", "run"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  a\ufffd[2J\ufffdb                50.00%"]
