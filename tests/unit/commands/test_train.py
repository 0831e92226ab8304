"""`hvd-train train`: its flags, and one line for wrong ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_train import Config, recipes
from hvd_train.commands import tree
from hvd_train.commands.train import settings_of
from tests.support.runs import DONE
from tests.unit.commands.conftest import Command


def parse_train(line: str) -> Config:
    return settings_of(tree.read(["train", *line.split()]))


def test_flags_of_other_trainers_are_accepted() -> None:
    assert parse_train("--lr=0.5") == recipes.get(recipes.DEFAULT).replace(learning_rate=0.5)
    line = "imagenet-resnet50 -a resnet18 -b 16 -j 3 --learning_rate 0.2 --accumulation_steps 2 "
    line += "--checkpoint old.ckpt --total-time 2h"
    assert parse_train(line) == recipes.get("imagenet-resnet50").replace(
        model="resnet18", batch_size=16, workers=3, learning_rate=0.2, accumulation_steps=2,
        resume="old.ckpt", max_time="2h",
    )  # fmt: skip


def test_a_batch_per_worker_replaces_the_global_batch() -> None:
    for flag in ("--batch-size 16", "-b=16", "--b 16", "--batch_size=16"):
        batch = parse_train(f"digits {flag}").batch
        assert (batch.batch_size, batch.global_batch_size) == (16, None)
        both = parse_train(f"digits {flag} --global-batch-size 48").batch
        assert (both.batch_size, both.global_batch_size) == (16, 48)


def test_a_folder_may_follow_the_recipe() -> None:
    made = recipes.get("imagenet-resnet50").replace(data_dir="/data/imagenet")
    assert parse_train("imagenet-resnet50 /data/imagenet") == made
    assert parse_train("digits images --data folder").data.data_dir == Path("images")


def test_a_recipe_is_named_by_place_or_flag() -> None:
    made = recipes.get("cifar10-resnet50").replace(seed=3)
    for line in ("cifar10-resnet50 --seed 3", "--seed 3 cifar10-resnet50"):
        assert parse_train(line) == made
    assert parse_train("--seed 3 --recipe=cifar10-resnet50") == made
    line = "bench scaling --np 1,2 cifar10-resnet50 --seed 3"
    assert settings_of(tree.read(line.split())) == made


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_can_be_tried_without_files(name: str) -> None:
    """For one epoch, which flags can change."""
    made = parse_train(f"{name} --try --epochs 2")
    assert (made.schedule.epochs, made.recipe, made.model.weights) == (2, f"try-{name}", None)
    assert made.data.data in ("digits", "synthetic") or made.data.data.startswith("hvd_train.")
    assert made.data.data != "synthetic" or made.data.synthetic_samples == 12


@pytest.mark.parametrize("own", ["model", "data", "task"])
def test_own_code_starts_from_plain_settings(own: str) -> None:
    """Unless a recipe is named."""
    code = {own: "mine:code"}
    made = parse_train(f"--{own} mine:code --epochs 3")
    assert made == recipes.plain().replace(epochs=3, **code)
    assert (made.schedule.schedule, made.schedule.warmup_epochs) == ("constant", 0)
    assert made.optimizer.weight_decay == 0
    assert parse_train(f"digits --{own} mine:code") == recipes.digits().replace(**code)


def test_a_model_of_a_library_starts_from_the_usual_recipe() -> None:
    for name in ("timm:resnet18", "resnet18"):
        assert parse_train(f"--model {name}") == recipes.digits().replace(model=name)


def test_none_is_written_in_any_case() -> None:
    for none in ("none", "None", "NONE"):
        line = f"--weights {none} --compression {none} --clip-norm={none} --freeze {none}"
        made = parse_train(f"cifar10-resnet18-transfer {line}")
        assert (made.model.weights, made.optimizer.clip_norm) == (None, None)
        assert (made.precision.compression, made.model.freeze) == ("none", "none")


@pytest.mark.parametrize(
    ("line", "changed", "says"),
    [
        (
            "cifar10-resnet50 --epochs 2",
            {"epochs": 2, "warmup_epochs": 0.05},
            "hvd-train: --epochs 2: the recipe's warm-up of 5 epochs becomes 0.05\n",
        ),
        ("cifar10-resnet50 --epochs 5", {"epochs": 5}, ""),
        (
            "digits --optimizer adam",
            {"optimizer": "adam", "nesterov": False},
            "hvd-train: --optimizer adam: the recipe's --nesterov is left out\n",
        ),
        ("digits --optimizer sgd", {}, ""),
    ],
)
def test_settings_of_a_recipe_give_way_to_flags(
    line: str, changed: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warm-up keeps its share of the epochs; one line says so."""
    recipe = recipes.get(line.split()[0])
    assert parse_train(line) == recipe.replace(**changed)
    assert capsys.readouterr().err == says


def test_a_config_file_is_a_whole_run(command: Command) -> None:
    """Flags change it."""
    Path("run.yaml").write_text(command("config digits --lr 0.5").out)
    written = recipes.get("digits").replace(learning_rate=0.5)
    assert parse_train("--config run.yaml") == written
    assert parse_train("--config run.yaml --seed 5") == written.replace(seed=5)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"finished": False, "stopped_by": 15}, 143),
        ({"finished": False}, 75),
        ({"finished": False, "stopped_by": 15, "saved": False}, 74),
    ],
)
def test_the_exit_code_says_how_a_training_ended(
    changes: dict[str, Any], code: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop without a commit on disk is 74: the same command could not resume from there."""
    monkeypatch.setattr("hvd_train.run.train", lambda _: replace(DONE, **changes))
    command("train", code)
