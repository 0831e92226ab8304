"""`hvd-train evaluate`: the scores of a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train import cli
from hvd_train.progress.figures import OF_CLASSES
from hvd_train.validate import Scores


def test_train_and_evaluate_agree_to_the_last_digit(capsys: pytest.CaptureFixture[str]) -> None:
    """The scores in summary.json are those that `evaluate` gives later, of the run, its checkpoint and its weights.

    Another set has other scores. Weights alone, far from their config, and what is not there are one line.
    """
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
    assert cli.run(["evaluate", "out/model-best.pt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == scores
    assert cli.run(["evaluate", "out", "--split", "train", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 1437
    for flags, told in {
        ("out", "--split", "test"): "out: its data set has no test set",
        ("out", "--data-dir", "d"): "--data-dir d: out was trained on digits, which are in no folder",
    }.items():
        assert cli.run(["evaluate", *flags]) == 2
        assert capsys.readouterr().err == f"hvd-train: {told}\n"
    Path("out/model-best.pt").rename("alone.pt")
    assert cli.run(["evaluate", "alone.pt"]) == 2
    assert "alone.pt holds weights alone, and what they are of stands in the config.yaml" in capsys.readouterr().err
    assert cli.run(["evaluate", "gone"]) == 2
    assert capsys.readouterr().err == "hvd-train: gone: no such run folder, checkpoint or file of weights\n"


def test_a_run_with_weights_as_safetensors_is_used_as_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    """By evaluate, predict, export, report, as weights to start from and as a teacher: the run, or its plain file."""
    flags = ["--epochs", "1", "--device", "cpu"]
    assert cli.run(["train", "digits", *flags, "--output-dir", "run", "--weights-format", "safetensors"]) == 0
    assert [path.name for path in sorted(Path("run").glob("model-*"))] == [
        "model-best.safetensors",
        "model-final.safetensors",
    ]
    capsys.readouterr()
    scores = []
    for target in ("run", "run/model-best.safetensors"):
        assert cli.run(["evaluate", target, "--json"]) == 0
        scores.append(json.loads(capsys.readouterr().out))
        assert cli.run(["predict", target, "--split", "val", "--json"]) == 0
        assert cli.run(["export", target, "--output", f"out-{len(scores)}"]) == 0
        capsys.readouterr()
    assert scores[0] == scores[1]
    assert (scores[0]["top1"], scores[0]["count"]) == (json.loads(Path("run/summary.json").read_text())["top1"], 360)
    assert cli.run(["report", "run"]) == 0
    assert "no predictions" not in Path("report.html").read_text()
    weights = ["--weights", "run/model-best.safetensors", "--output-dir", "other"]
    assert cli.run(["train", "digits", *flags, *weights]) == 0
    assert "starting from the weights run/model-best.safetensors" in capsys.readouterr().out
    student = ["--task", "distillation", "--task-args", "teacher=run", "--output-dir", "student"]
    assert cli.run(["train", "digits", *flags, *student]) == 0


def test_a_class_folder_cannot_act_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name has one line, whatever signs it is made of."""
    scores = Scores({"loss": 1.0, "top1": 0.5, "top5": 1.0}, 2, OF_CLASSES, {"a\x1b[2J\nb": 0.5}, "top-1 of each class")
    monkeypatch.setattr("hvd_train.run.evaluate", lambda *_, **__: scores)
    assert cli.run(["evaluate", "run"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "top-1 of each class:",
        "  a\ufffd[2J\ufffdb                50.00%",
    ]


def test_without_a_name_the_newest_run_is_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line on standard error says which one, so that --json stays JSON."""
    asked: list[Path] = []
    scores = Scores({"loss": 1.0, "top1": 0.5, "top5": 1.0}, 2, OF_CLASSES, {"a": 0.5})
    monkeypatch.setattr("hvd_train.run.evaluate", lambda target, **_: asked.append(target) or scores)
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.yaml").touch()
    assert cli.run(["evaluate", "--json"]) == 0
    assert asked == [Path("runs/mine")]
    told = capsys.readouterr()
    assert json.loads(told.out)["top1"] == 0.5
    assert told.err == "hvd-train: the newest run: runs/mine\n"
