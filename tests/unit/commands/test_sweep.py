"""Many trainings from one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train import Config
from hvd_train.cli import run
from hvd_train.commands import sweep


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("digits", {"only": "digits"}),
        ("digits --lr 0.1,0.2", {"lr=0.1": "digits --lr 0.1", "lr=0.2": "digits --lr 0.2"}),
        (
            "digits -b=16,32 --nesterov --seed 1,2",
            {
                f"b={size} seed={seed}": f"digits -b {size} --nesterov --seed {seed}"
                for size in (16, 32)
                for seed in (1, 2)
            },
        ),
        (
            "digits --gpu_ids 0,1 --lr -1,2",
            {"lr=-1": "digits --gpu_ids 0,1 --lr -1", "lr=2": "digits --gpu_ids 0,1 --lr 2"},
        ),
        (
            "--optimizer-args betas=[0.9,0.95] eps=1e-6 --seed 1,2",
            {f"seed={seed}": f"--optimizer-args betas=[0.9,0.95] eps=1e-6 --seed {seed}" for seed in (1, 2)},
        ),
    ],
)
def test_every_combination(arguments: str, expected: dict[str, str]) -> None:
    """Of the values that stand with commas; lists stay lists."""
    assert {name: " ".join(words) for name, words in sweep.combinations(arguments.split())} == expected


def test_one_after_the_other_without_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    """A table with the best first; one that fails is named with its reason, and does not take the others with it."""
    line = "sweep digits --epochs 1 --device cpu --lr 0.2,1e30,0.001 --output-dir out"
    assert run(line.split()) == 1
    rows = json.loads(Path("out/sweep.json").read_text())
    assert [row["name"] for row in rows] == ["lr=0.2", "lr=0.001", "lr=1e30"]
    assert rows[0]["top1"] > rows[1]["top1"]
    assert [row["failed"] is None for row in rows] == [True, True, False]
    assert "the loss is not finite" in rows[2]["failed"]
    printed = capsys.readouterr().out
    assert "lr=0.2: " in printed
    assert "epoch 1/1" not in printed, "what a training prints belongs into its own file"
    assert "epoch 1/1" in Path("out/000-lr=0.2.log").read_text()
    assert (Path("out/002-lr=0.001/model-best.pt")).exists()
    assert run([*line.replace("1e30,", "").split()]) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--lr 0.1,x", "--learning-rate: it must be a number, not 'x'"),
        ("--model resnet18,resnet81", "unknown model 'resnet81'"),
        ("--workers-per-run 0", "--workers-per-run 0: it must be a whole number from 1 on"),
        ("--tuned tuned.env", "--tuned does not go with a sweep"),
        ("--workers-per-run 2", "--workers-per-run 2 needs a launcher: type `mpirun -np 2 hvd-train sweep"),
    ],
)
def test_what_cannot_be_is_told_before_any_of_them_starts(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and no folder."""
    assert run(["sweep", "digits", *arguments.split()]) == 2
    assert reason in capsys.readouterr().err
    assert not Path("runs").exists()


def test_what_a_training_says_does_not_act_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does the table take it for markup: a model may raise anything."""

    def fails(config: Config, **named: object) -> None:
        raise ValueError("[/b] \x1b[2J \u202e")

    monkeypatch.setattr("hvd_train.run.train", fails)
    assert run(["sweep", "digits", "--output-dir", "out"]) == 1
    printed = capsys.readouterr().out
    assert " ".join(printed.split()).count("ValueError: [/b] \ufffd[2J \ufffd") == 2
    assert not {"\x1b", "\u202e"} & set(printed)
