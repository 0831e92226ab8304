"""A whole config: its fields found by name, what differs between two, and what two groups rule out together."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from hvd_train import Config
from hvd_train.config import GROUPS
from hvd_train.errors import UsageError
from tests.support.refused import assert_refused


def test_field_names_are_unique_across_groups_and_documented() -> None:
    """A flag needs no prefix, and its help is the text under the field."""
    own = [f.name for f in dataclasses.fields(Config) if f.name not in GROUPS]
    names = own + [f.name for cls in GROUPS.values() for f in dataclasses.fields(cls)]
    assert len(names) == len(set(names))
    for cls in GROUPS.values():
        source = inspect.getsource(cls)
        for field in dataclasses.fields(cls):
            assert re.search(rf'^    {field.name}: .*\n    """', source, re.MULTILINE), field.name


def test_replace_finds_a_field_in_whatever_group_it_is() -> None:
    """Values of several groups change at once; the rest stays and the old config too."""
    base = Config()
    changed = base.replace(epochs=3, learning_rate=0.5, seed=9)
    assert (changed.schedule.epochs, changed.optimizer.learning_rate, changed.seed) == (3, 0.5, 9)
    assert changed.data == base.data
    assert (base.schedule.epochs, base.seed) == (10, 0)


def test_replace_names_the_nearest_setting() -> None:
    """A misspelt setting is answered with the one that was meant."""
    with pytest.raises(UsageError, match="unknown setting 'learning_rat'; did you mean 'learning_rate'"):
        Config().replace(learning_rat=1)


def test_differences_name_what_decides_the_result_and_nothing_else() -> None:
    """Where, how often and on what device may change from one life of a run to the next."""
    base = Config()
    free = base.replace(
        data_dir=Path("x"), workers=9, device="cuda", output_dir=Path("y"), resume="never", commit_steps=7,
        commit_seconds=1.0, keep_checkpoints=9, log_steps=9, eval_epochs=9, recipe="other",
    )  # fmt: skip
    assert base.differences(free) == []
    other = base.replace(epochs=4, seed=2, decay_epochs=(1.0,))
    assert base.differences(other) == ["seed: 0, not 2", "epochs: 10, not 4", "decay_epochs: [30, 60, 80], not [1.0]"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "--seed is -1"),
        (
            {"device": "cpu", "data": "folder", "data_dir": Path(), "decode": "gpu"},
            "--decode gpu needs a GPU: leave out --device cpu, or type --decode cpu",
        ),
        ({"on_resize": "per-worker"}, "add --lr-scaling linear or sqrt"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    """The message names the flag, the value and what it must be."""
    assert_refused(changes, message)


def test_epochs_that_would_see_some_samples_more_often() -> None:
    """Epochs that repeated augmentation cannot fill evenly are refused, with the number to type."""
    with pytest.raises(UsageError, match=r"--epochs 5 is not a multiple of --repeated-augmentation 4.*type --epochs 8"):
        Config().replace(epochs=5, repeated_augmentation=4)


def test_what_may_differ_when_a_run_goes_on() -> None:
    """Where, how often and how long, but nothing that decides which model comes out."""
    changed = Config().replace(
        commit_steps=7, log_steps=3, epochs=Config().schedule.epochs + 1, patience=4, workers=3, device="cpu"
    )
    assert [line.split()[0] for line in changed.differences(Config())] == ["epochs:"]
    folder = Config().replace(data="folder", data_dir=Path())
    assert folder.replace(decode="gpu").differences(folder) == ["decode: gpu, not cpu"]
    kept = folder.replace(cache="disk")
    assert kept.differences(folder) == ["cache: disk, not none"]
    assert kept.differences(folder.replace(cache="memory", cache_dir=Path("elsewhere"))) == []
    for settings in ({"seed": 1}, {"clip_norm": 1.0}, {"precision": "bf16"}, {"learning_rate": 0.5}):
        assert len(Config().replace(**settings).differences(Config())) == 1, settings


@pytest.mark.parametrize("name", ["output_dir", "log_dir", "tuned", "data_dir"])
def test_a_program_may_give_a_path_as_text(name: str) -> None:
    """`replace(output_dir="run")` is the run folder that `Path("run")` is."""
    assert Config().replace(**{name: "run"}) == Config().replace(**{name: Path("run")})
    assert isinstance(Config().replace(**{name: "run"}).settings()[name], Path)
