"""`hvd-train train`: its flags, and one line for wrong ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from hvd_train import Config, cli, config_file, recipes
from hvd_train.commands import tree
from hvd_train.commands.train import settings_of
from tests.support.runs import DONE


def parse_train(arguments: list[str]) -> Config:
    return settings_of(tree.read(["train", *arguments]))


def test_flags_of_other_trainers_are_accepted() -> None:
    assert parse_train(["--lr=0.5"]) == recipes.get(recipes.DEFAULT).replace(learning_rate=0.5)
    line = "imagenet-resnet50 -a resnet18 -b 16 -j 3 --learning_rate 0.2 --accumulation_steps 2 "
    line += "--checkpoint old.ckpt --total-time 2h"
    assert parse_train(line.split()) == recipes.get("imagenet-resnet50").replace(
        model="resnet18", batch_size=16, workers=3, learning_rate=0.2, accumulation_steps=2,
        resume="old.ckpt", max_time="2h",
    )  # fmt: skip


def test_a_batch_per_worker_replaces_the_global_batch() -> None:
    for arguments in (["--batch-size", "16"], ["-b=16"], ["--b", "16"], ["--batch_size=16"]):
        batch = parse_train(["digits", *arguments]).batch
        assert (batch.batch_size, batch.global_batch_size) == (16, None)
        both = parse_train(["digits", *arguments, "--global-batch-size", "48"]).batch
        assert (both.batch_size, both.global_batch_size) == (16, 48)


def test_a_folder_may_follow_the_recipe() -> None:
    made = recipes.get("imagenet-resnet50").replace(data_dir="/data/imagenet")
    assert parse_train(["imagenet-resnet50", "/data/imagenet"]) == made
    assert parse_train(["digits", "images", "--data", "folder"]).data.data_dir == Path("images")


def test_a_recipe_is_named_by_place_or_flag() -> None:
    made = recipes.get("cifar10-resnet50").replace(seed=3)
    for words in (
        "cifar10-resnet50 --seed 3",
        "--seed 3 cifar10-resnet50",
        "--seed 3 --recipe=cifar10-resnet50",
    ):
        assert parse_train(words.split()) == made
    line = "bench scaling --np 1,2 cifar10-resnet50 --seed 3"
    assert settings_of(tree.read(line.split())) == made


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_can_be_tried_without_files(name: str) -> None:
    """For one epoch, which flags can change."""
    made = parse_train([name, "--try", "--epochs", "2"])
    assert (made.schedule.epochs, made.recipe, made.model.weights) == (2, f"try-{name}", None)
    assert made.data.data in ("digits", "synthetic") or made.data.data.startswith("hvd_train.")
    assert made.data.data != "synthetic" or made.data.synthetic_samples == 12


def test_own_code_starts_from_plain_settings() -> None:
    """Unless a recipe is named."""
    for own in ("--model", "--data", "--task"):
        made = parse_train([own, "mine:code", "--epochs", "3"])
        assert made == recipes.plain().replace(epochs=3, **{own[2:]: "mine:code"})
        assert (
            made.schedule.warmup_epochs,
            made.schedule.schedule,
            made.optimizer.weight_decay,
        ) == (0, "constant", 0)
        assert parse_train(["digits", own, "mine:code"]) == recipes.digits().replace(
            **{own[2:]: "mine:code"}
        )
    for name in ("timm:resnet18", "resnet18"):
        assert parse_train(["--model", name]) == recipes.digits().replace(model=name)


def test_none_is_written_in_any_case() -> None:
    for none in ("none", "None", "NONE"):
        line = (
            f"cifar10-resnet18-transfer --weights {none} --compression {none} "
            f"--clip-norm={none} --freeze {none}"
        )
        made = parse_train(line.split())
        assert (made.model.weights, made.optimizer.clip_norm) == (None, None)
        assert (made.precision.compression, made.model.freeze) == ("none", "none")


def test_a_warm_up_gives_way_to_fewer_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps its share of the epochs; one line says so."""
    assert parse_train(["cifar10-resnet50", "--epochs", "2"]).schedule.warmup_epochs == 0.05
    assert (
        capsys.readouterr().err
        == "hvd-train: --epochs 2: the recipe's warm-up of 5 epochs becomes 0.05\n"
    )
    assert parse_train(["cifar10-resnet50", "--epochs", "5"]).schedule.warmup_epochs == 5
    assert capsys.readouterr().err == ""


def test_nesterov_momentum_gives_way_to_another_optimizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not parse_train(["digits", "--optimizer", "adam"]).optimizer.nesterov
    assert (
        capsys.readouterr().err
        == "hvd-train: --optimizer adam: the recipe's --nesterov is left out\n"
    )
    assert parse_train(["digits", "--optimizer", "sgd"]).optimizer.nesterov


def test_a_config_file_is_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags change it."""
    assert cli.run(["config", "digits", "--lr", "0.5"]) == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    written = recipes.get("digits").replace(learning_rate=0.5)
    assert config_file.load(Path("run.yaml")) == written
    for arguments in (["--config=run.yaml"], ["--config", "run.yaml"]):
        assert parse_train(arguments) == written
        assert parse_train([*arguments, "--seed", "5"]) == written.replace(seed=5)


@pytest.mark.parametrize(
    ("finished", "stopped_by", "saved", "code"),
    [
        (True, None, True, 0),
        (False, 15, True, 143),
        (False, None, True, 75),
        (False, 15, False, 74),
    ],
)
def test_the_exit_code_says_how_a_training_ended(
    finished: bool, stopped_by: int | None, saved: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop without a commit on disk is 74: the same command could not resume from there."""
    result = replace(DONE, finished=finished, stopped_by=stopped_by, saved=saved)
    monkeypatch.setattr("hvd_train.run.train", lambda _: result)
    assert cli.run(["train"]) == code
