"""What is typed about optimizers and schedules: in any case, cleared, refused where it has no effect, noted once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvd_train import cli, config_file, recipes
from hvd_train.commands.train import parse_train
from hvd_train.errors import UsageError
from hvd_train.network import optim

MINE = """
import torch

def plain(named_parameters, lr):
    return torch.optim.SGD([p for _, p in named_parameters], lr)

def decaying(named_parameters, lr, weight_decay=0.0):
    return torch.optim.SGD([p for _, p in named_parameters], lr, weight_decay=weight_decay)
"""


def test_built_in_names_are_understood_in_any_case() -> None:
    """As other choices are, and as if they had been typed in small letters."""
    for typed in ("--optimizer AdamW --schedule One-Cycle", "--optimizer SGD --schedule COSINE"):
        assert parse_train(typed.split()) == parse_train(typed.lower().split())


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--optimizer mine.py:Own", "write MODULE:FUNCTION, as in --optimizer mine:Own"),
        ("--schedule mine.f", "write MODULE:FUNCTION, as in --schedule mine:f"),
        ("--optimizer mine", "as in --optimizer mine:optimizer"),
        (
            "--optimizer mine:Own --momentum 0.8",
            "--momentum has no effect on --optimizer mine:Own: type --optimizer-args",
        ),
        ("--optimizer adm", "unknown optimizer 'adm'; did you mean 'adam'?"),
    ],
)
def test_a_mistake_is_one_line(typed: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And the only one: no note on what the recipe would have changed comes before it."""
    Path("mine.py").touch()
    assert cli.run(["train", "digits", "--no-nesterov" if ":" in typed else "--seed=1", *typed.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


def test_a_file_beside_it_takes_no_name_of_an_optimizer_away() -> None:
    """An adam.py in the current folder does not make this optimizer a mistake."""
    Path("adam.py").touch()
    assert parse_train(["--optimizer", "adam"]).optimizer.optimizer == "adam"


def test_a_weight_decay_that_a_function_does_not_take_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have no effect; nor has the choice of what decays, since the function makes its groups itself."""
    Path("mine_decays.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for typed, told in [
        ("plain --weight-decay 0.1", "takes no weight_decay, which is 0.1: let it take one, or type --weight-decay 0"),
        ("decaying --decay-of weights", "--decay-of weights has no effect on --optimizer mine_decays:decaying"),
    ]:
        with pytest.raises(UsageError, match=re.escape(told)):
            optim.check(parse_train(["--optimizer", *f"mine_decays:{typed}".split()]).optimizer)
    for typed in (
        "plain --weight-decay 0",
        "plain --weight-decay 0 --decay-of weights",  # as a recipe may have it
        "decaying --weight-decay 0.1",
    ):
        optim.check(parse_train(["--optimizer", *f"mine_decays:{typed}".split()]).optimizer)


@pytest.mark.parametrize("nothing", ["--optimizer-args none", "--optimizer-args", "--optimizer-args="])
def test_arguments_that_a_file_brought_for_another_optimizer_can_be_cleared(nothing: str) -> None:
    """Otherwise the file would have to be edited."""
    config = recipes.get("cifar10-resnet18-transfer").replace(optimizer_args=("betas=[0.8,0.9]",))
    Path("run.yaml").write_text(config_file.dump(config))
    optimizer = parse_train(["--config", "run.yaml", "--optimizer", "sgd", *nothing.split(), "--seed", "1"]).optimizer
    assert (optimizer.optimizer, optimizer.optimizer_args) == ("sgd", ())


def test_the_rise_of_one_cycle_is_not_the_warm_up_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """But its own share of the run, or what is typed."""
    assert parse_train(["digits", "--schedule", "one-cycle", "--epochs", "2"]).schedule.warmup_epochs == 0
    note = "--warmup-epochs 0 instead of the recipe's 1, which does not go with --schedule one-cycle"
    assert capsys.readouterr().err == f"hvd-train: {note}\n"
    typed = parse_train(["digits", "--schedule", "one-cycle", "--warmup-epochs", "3"])
    assert (typed.schedule.warmup_epochs, capsys.readouterr().err) == (3, "")


def test_a_sweep_says_a_note_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Not for each of its trainings."""
    monkeypatch.setattr("hvd_train.commands.sweep.train_all", lambda sweep, workers, folder: len(sweep))
    assert cli.run(["sweep", "digits", "--optimizer", "adam", "--lr", "0.1,0.2"]) == 2
    assert capsys.readouterr().err.count("--no-nesterov instead of the recipe's --nesterov") == 1
