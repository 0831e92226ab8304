"""`hvd-train train`: what it understands, and one line for what it does not."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_train import Config, cli, config_file, recipes
from hvd_train.commands.train import ALIASES, parse_train
from hvd_train.errors import UsageError
from hvd_train.launch.launcher import SPENT


def test_without_arguments_the_default_recipe_is_meant() -> None:
    """And with a recipe's name that recipe."""
    assert parse_train([]) == recipes.get(recipes.DEFAULT)
    assert parse_train(["digits"]) == recipes.get("digits")


@pytest.mark.parametrize(
    "spelling", [["--lr", "0.5"], ["--lr=0.5"], ["--learning-rate=0.5"], ["--learning_rate", "0.5"]]
)
def test_a_flag_may_be_spelt_as_people_do(spelling: list[str]) -> None:
    """Aliases, underscores, with a blank or an equals sign."""
    assert parse_train(["digits", *spelling]) == recipes.get("digits").replace(learning_rate=0.5)


def test_every_promised_flag_is_there() -> None:
    """The names that scripts rely on, each arriving in its field."""
    given = {
        "epochs": "3", "global-batch-size": "60", "accumulation-steps": "2", "seed": "4", "data": "folder",
        "data-dir": "d", "model": "resnet18", "workers": "1", "precision": "bf16", "compression": "fp16",
        "device": "cpu", "commit-steps": "5", "commit-seconds": "7", "resume": "never", "output-dir": "out",
    }  # fmt: skip
    made = parse_train([part for name, value in given.items() for part in (f"--{name}", value)])
    assert made == recipes.get("digits").replace(
        epochs=3, global_batch_size=60, accumulation_steps=2, seed=4, data="folder", data_dir=Path("d"),
        model="resnet18", workers=1, precision="bf16", compression="fp16", device="cpu", commit_steps=5,
        commit_seconds=7.0, resume="never", output_dir=Path("out"),
    )  # fmt: skip


def test_names_of_other_trainers() -> None:
    """What people type there arrives in the field that means it here."""
    line = "imagenet-resnet50 -a resnet18 -b 16 -j 3 --learning_rate 0.2 --accumulation_steps 2 --gpu_ids 0,1 "
    made = parse_train([*line.split(), "--resume", "old.ckpt", "--desired-acc", "0.75"])
    assert made == recipes.get("imagenet-resnet50").replace(
        model="resnet18", batch_size=16, workers=3, learning_rate=0.2, accumulation_steps=2, gpu_ids=(0, 1),
        resume="old.ckpt", target_accuracy=0.75,
        workers_per_host=None,
    )  # fmt: skip
    assert parse_train(["--arch=vgg11", "--gpu_ids=1"]).run.gpu_ids == (1,)


def test_the_help_has_every_way_to_say_something(capsys: pytest.CaptureFixture[str]) -> None:
    """The recipes, every setting with its other names and its type in words, and the file that is none of them."""
    assert cli.run(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    flags = {word.rstrip(",") for line in lines if line.startswith("  ") for word in line[:80].split()}
    assert {f"--{name.replace('_', '-')}" for name in recipes.digits().settings()} <= flags
    assert {*recipes.RECIPES, *ALIASES, "--config", "--np", "--hosts", "--no-nesterov", "--help"} <= flags
    assert "  --workers, -j INT or none" in lines
    assert "  --decay-epochs FLOAT ..." in [line[:26].rstrip() for line in lines]
    told = " ".join(" ".join(lines).split())
    assert told.index("most used flags: --data TEXT") < told.index(
        "--epochs INT Passes over the training set. (default: 20)"
    )
    assert "--nesterov, --no-nesterov Use Nesterov momentum, with sgd or lars. (default: on)" in told


def test_the_help_shows_the_defaults_of_the_recipe_or_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe that does not exist is answered with the nearest."""
    Path("mine.yaml").write_text(config_file.dump(recipes.digits().replace(epochs=7)))
    for typed, epochs in (("imagenet-resnet50", 90), ("--config mine.yaml", 7), ("--np 2 --recipe=digits", 20)):
        assert cli.run(["train", *typed.split(), "--help"]) == 0
        assert f"Passes over the training set. (default: {epochs})" in capsys.readouterr().out
    assert cli.run(["train", "digit", "--help"]) == 2
    assert capsys.readouterr() == ("", "hvd-train: unknown recipe 'digit'; did you mean 'digits'?\n")


@pytest.mark.parametrize("flag", ["--world_size", "--rank", "--dist_url", "--nproc_per_node", "--local_rank"])
@pytest.mark.parametrize("form", ["{} 4", "{}=4"])
def test_what_launchers_say_here(flag: str, form: str) -> None:
    """One line with the command to type instead."""
    with pytest.raises(UsageError, match=r"^--[a-z-]*: ranks are started by `hvd-train train --np 4 "):
        parse_train(["digits", *form.format(flag).split()])


@pytest.mark.parametrize(
    ("arguments", "rate"),
    [("", 0.1), ("-a alexnet", 0.01), ("--model vgg16", 0.01), ("-a vgg16_bn", 0.1), ("-a vgg16 --lr 0.3", 0.3)],
)
def test_networks_without_batch_norm_start_lower(arguments: str, rate: float) -> None:
    """In `imagenet-resnet50`, unless the user says otherwise."""
    assert parse_train(["imagenet-resnet50", *arguments.split()]).optimizer.learning_rate == rate


@pytest.mark.parametrize("arguments", [["--batch-size", "16"], ["-b=16"], ["-b", "16"], ["--batch_size=16"]])
def test_a_batch_per_worker_takes_the_place_of_the_global_one(arguments: list[str]) -> None:
    """A recipe's global batch does not contradict what the user types."""
    batch = parse_train(["digits", *arguments]).batch
    assert (batch.batch_size, batch.global_batch_size) == (16, None)
    both = parse_train(["digits", *arguments, "--global-batch-size", "48"]).batch
    assert (both.batch_size, both.global_batch_size) == (16, 48)


@pytest.mark.parametrize("flag", ["--config={}", "--config {}"])
def test_a_config_file_is_a_whole_run(flag: str) -> None:
    """Flags change it; a recipe beside it is refused."""
    written = Config().replace(epochs=7, seed=3)
    Path("run.yaml").write_text(config_file.dump(written))
    arguments = flag.format("run.yaml").split()
    assert parse_train(arguments) == written
    assert parse_train([*arguments, "--seed", "5"]) == written.replace(seed=5)
    with pytest.raises(UsageError, match=r"--config run\.yaml is a whole run already; leave out the recipe 'digits'"):
        parse_train(["digits", *arguments])
    with pytest.raises(UsageError, match="--config needs the path"):
        parse_train(["--config"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit"], "unknown recipe 'digit'; did you mean 'digits'"),
        (["--epoch", "3"], "unknown argument '--epoch'; did you mean '--epochs'"),
        (["--learning-rat=3"], "unknown argument '--learning-rat'; did you mean '--learning-rate'"),
        (["--epochs", "many"], "many"),
        (["--epochs", "0"], "--epochs is 0; it must be at least 1"),
        (["--precision", "fp8"], "fp8"),
        (["--epochs"], "epochs"),
        (["--data", "folder"], "--data folder needs --data-dir"),
        (["--data", "hf:a", "--data-dir", "b"], "--data hf:a names its folder already: leave --data-dir out"),
        (["--config", "none.yaml"], "cannot read none.yaml"),
    ],
)
def test_what_cannot_be_is_one_line_and_code_two(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, without a traceback, before anything is started."""
    assert cli.run(["train", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(rf"hvd-train: .*{re.escape(message)}.*\n", told.err), told.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "cifar"], "unknown data set 'cifar'; did you mean 'cifar10'"),
        (["--model", "resnet19"], "unknown model 'resnet19'; did you mean 'resnet1"),
        (["--resume", "nothing.ckpt"], "--resume nothing.ckpt: no such file"),
        (["--model", "nowhere:f"], "cannot import nowhere"),
        (["--global-batch-size", "5000"], "a global batch of 5000 samples is larger than the training set of 1437"),
        (["--model", "vit_b_16"], "model vit_b_16 cannot take images of 3 x 8 x 8"),
        (["--data", "folder", "--data-dir", "gone"], "--data-dir gone is not a folder"),
        (["--data", "webdataset", "--data-dir", "gone"], "--data-dir gone is not a folder"),
        (["--data", "hf:gone"], "--data hf:gone: there is no such folder"),
    ],
)
def test_names_and_data_that_are_not_there_are_one_line_too(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left behind that a next run would trip over."""
    assert cli.run(["train", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("hvd-train: ")
    assert message in told
    assert told.count("\n") == 1


def test_a_training_throws_away_what_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's collector rests while torch is imported, and only then."""
    collects = []

    def training(_: Config) -> SimpleNamespace:
        collects.append(gc.isenabled())
        return SimpleNamespace(finished=True, saved=True)

    monkeypatch.setattr("hvd_train.run.train", training)
    assert cli.run(["train"]) == 0
    assert collects == [True]


@pytest.mark.parametrize(
    ("finished", "stopped_by", "saved", "code"),
    [
        *[(True, None, True, 0), (False, 15, True, 143), (False, 1, True, 129), (False, None, True, 75)],
        *[(True, None, False, 74), (False, 15, False, 74), (False, None, False, 74)],
    ],
)
def test_the_exit_code_says_how_a_training_ended(
    finished: bool, stopped_by: int | None, saved: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop whose commit is not on disk has a code of its own: the same command would not go on from there."""
    result = SimpleNamespace(finished=finished, stopped_by=stopped_by, saved=saved)
    monkeypatch.setattr("hvd_train.run.train", lambda _: result)
    assert cli.run(["train"]) == code


def test_a_time_limit_is_that_of_the_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 75 with a commit when its time is over, however young this process is; the same command goes on."""
    command = ["train", "digits", "--max-time", "1h", "--epochs", "1", "--device", "cpu", "--output-dir", "run"]
    monkeypatch.setenv(SPENT, "3601")
    assert cli.run(command) == os.EX_TEMPFAIL
    assert "stopped by its time limit (--max-time 1h) at step 1, committed" in capsys.readouterr().out
    monkeypatch.setenv(SPENT, "60")
    assert cli.run(command) == 0
    assert "going on at" in capsys.readouterr().out


def test_arguments_of_the_optimizer_may_be_typed_at_once_or_one_by_one() -> None:
    """All count, whatever stands between them."""
    ways = [
        "--optimizer-args eps=1e-6 betas=[0.9,0.95] --epochs 3",
        "--optimizer-args=eps=1e-6 --epochs 3 --optimizer-args betas=[0.9,0.95]",
        "--optimizer_args eps=1e-6 --optimizer-args=betas=[0.9,0.95] --epochs 3",
    ]
    for way in ways:
        config = parse_train(["digits", "--optimizer", "adam", "--no-nesterov", *way.split()])
        assert config.optimizer.optimizer_args == ("eps=1e-6", "betas=[0.9,0.95]")
        assert config.schedule.epochs == 3


@pytest.mark.parametrize("what", ["optimizer", "schedule"])
def test_an_optimizer_or_a_schedule_that_a_file_names_is_code_as_well(what: str) -> None:
    """Commands that do not train import it only where the user trusts the file."""
    config = parse_train([f"--{what}", "mine:own", "--no-nesterov"])
    Path("run.yaml").write_text(config_file.dump(config))
    with pytest.raises(UsageError, match=rf"names code \({what}: mine:own\).*--trust"):
        parse_train(["--config", "run.yaml"], "config", trust=False)
    assert parse_train(["--config", "run.yaml"]).settings()[what] == "mine:own"


def test_a_run_that_resume_names_brings_its_settings() -> None:
    """Without a recipe. They are those of its config.yaml but for the folder, whose name may have changed."""
    run = Config().replace(recipe="mine", schedule="constant", epochs=7, seed=3, output_dir=Path("before"))
    Path("run").mkdir()
    Path("run/config.yaml").write_text(config_file.dump(run))
    assert parse_train(["--resume", "run", "--epochs", "9"]) == run.replace(output_dir=None, resume="run", epochs=9)
    assert parse_train(["digits", "--resume", "run"]) == recipes.get("digits").replace(resume="run")
    Path("config.yaml").write_text(config_file.dump(run))  # whoever stands in a run folder has not named it
    assert parse_train([]) == recipes.get("digits")


def test_a_finished_run_goes_on_or_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    """With more epochs. One whose learning rate has followed their number is refused, in a line that works."""
    line = ["--device", "cpu", "--output-dir", "run", "--epochs"]
    assert cli.run(["train", "digits", "--schedule", "constant", *line, "1"]) == 0
    assert cli.run(["train", "--resume", "run", "--epochs", "2"]) == 0
    assert "going on at epoch 2" in capsys.readouterr().out
    short = ["--epochs", "1", "--warmup-epochs", "0", "--lr", "0.01"]
    assert cli.run(["train", "digits", "--device", "cpu", "--output-dir", "cosine", *short]) == 0
    assert cli.run(["train", "--resume", "cosine", "--epochs", "2"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "--weights cosine/model-best.pt --output-dir OTHER" in told
    flags = ["--weights", "cosine/model-best.pt", "--output-dir", "other", "--epochs", "1", "--device", "cpu"]
    assert cli.run(["train", "digits", *flags]) == 0
