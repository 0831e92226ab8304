"""`hvd-train train` and `config`: commands that take a recipe and the flags of a training."""

import gc
import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from hvd_train import config_file, console, plugin, recipes
from hvd_train.config import Config
from hvd_train.console import PROGRAM
from hvd_train.errors import UsageError, whole_number
from hvd_train.flags import settings_parser, take
from hvd_train.launch import launcher, roll_call
from hvd_train.run_files import run_folder

# Flags of launchers and other trainers that would be a misunderstanding here, and what to type.
ELSEWHERE = {
    "--amp": "type --precision fp16 or bf16",
    "--base-lr": "type --learning-rate, and --lr-scaling linear to scale it",
    "--dummy": "type --data synthetic",
    "--elastic": "it is for the launcher: `hvd-train launch --elastic -- train`",
    "--fp16": "type --precision fp16",
    "--fp16-allreduce": "type --compression fp16",
    "--gpus": "each rank takes a GPU: `hvd-train train --np 4` starts four",
    "--log-dir": "type --output-dir for the run folder, which holds tensorboard/",
    "--no-cuda": "type --device cpu",
    "--nodes": "name the hosts: `hvd-train train --hosts h1:4,h2:4`",
    "--opt-level": "apex's O1 and O2 are --precision fp16, its O0 is --precision fp32",
    "--pretrained": "type --weights DEFAULT",
    "--start-epoch": "the same command resumes where it stopped",
    "--workers-per-node": "type --workers for the loader processes of each rank",
    **dict.fromkeys(("--np", "-np", "--hosts", "-H"), "only `hvd-train train` starts ranks"),
    **dict.fromkeys(("--train-dir", "--val-dir"), "type --data-dir for the folder that holds train/ and val/"),
    **dict.fromkeys(("-e", "--evaluate"), "type `hvd-train evaluate RUN`"),
    **dict.fromkeys(("--rank", "--world-size", "--dist-url", "--dist-backend"), "--np 4 starts four ranks"),
}
_READ_FOLDERS = "folder", "cifar10", "cifar100"
_ABOUT = """Train a recipe, changed by flags.

    hvd-train train digits --np 2 --epochs 5 --output-dir runs/mine

--np 2 starts two ranks here, --hosts h1:4,h2:4 eight on two hosts.

With --try a recipe takes a minute: three steps on random images.

`hvd-train help` lists the recipes. Flags that are used most:
--epochs, --batch-size, --learning-rate, --model, --weights, --data,
--data-dir, --output-dir."""


def train(arguments: list[str]) -> int:
    """Train and return the exit code. Raises UsageError for wrong settings.

    The code is 0 for a finished run, 128 + N if signal N stopped it, 75 (EX_TEMPFAIL) if its launcher did, and 74
    (EX_IOERR) if its last files could not be written.
    """
    console.outlive()
    settings = parse_train(arguments)
    roll_call.started(os.environ)
    gc.disable()  # a fifth of the time of this import would go into searching objects that live to the end for garbage
    from hvd_train import run

    gc.enable()
    return run.train(settings).exit_code


def config(arguments: list[str]) -> int:
    """Check the settings, print them as YAML and return 0. Raises UsageError for wrong settings."""
    options, arguments = take(arguments, trust=False)
    settings = parse_train(arguments, "config", trust=options.trust)
    from hvd_train.run import check  # imports torch

    check(settings)
    print(config_file.dump(settings), end="")
    return 0


def check_local(config: Config, command: str) -> None:
    """Raise UsageError if the output of a command that has several runs is one URL, or lies below a file."""
    if config.run.copy_to:
        raise UsageError(f"{PROGRAM} {command} has several runs, and {config.run.copy_to} is for one: name a folder")
    folder = config.run.output_dir
    if folder and (file := next(filter(Path.is_file, [folder, *folder.parents]), None)):
        raise UsageError(f"--output-dir {file} is a file: name a folder")


def parse_train(arguments: list[str], command: str = "train", *, trust: bool = True, notes: bool = True) -> Config:
    """Return the config of `hvd-train train ...`: a recipe or --config FILE, changed by the flags.

    Without `trust` the file must name no code or URL that no flag names. Raises UsageError, which names `command`.
    """
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    arguments = arguments[len(words) :]
    for flag in (argument.partition("=")[0].replace("_", "-") for argument in arguments):
        if flag in ELSEWHERE:
            raise UsageError(f"{flag} is no flag of {command}: {ELSEWHERE[flag]}")
    shown = recipes.RECIPES.get("".join(words[:1]), recipes.digits)()
    parser = settings_parser(f"{PROGRAM} {command} [RECIPE] [DATA_DIR]", shown, _ABOUT)
    parser.add_argument("--config", metavar="FILE", help="read all settings from a config.yaml")
    parser.add_argument("--try", action="store_true", help="try the recipe for a minute")
    given = vars(parser.read(arguments))
    path = given.pop("config", None)
    tries = given.pop("try", False)
    recipe = given.pop("recipe", None)
    if words:
        named = recipe
        recipe = words.pop(0)
        if named not in (None, recipe):
            raise UsageError(f"{recipe} and --recipe {named} are two recipes: name one")
    if "/" in (recipe or ""):
        raise UsageError(f"{recipe} is no recipe; name one first: {PROGRAM} {command} imagenet-resnet50 {recipe}")
    if path is None and recipe is None:
        base = _unnamed(given)
    elif path is None:
        base = recipes.get(recipe)
    elif recipe is None:
        base = config_file.load(Path(path))
    else:
        raise UsageError(f"--config {path} is a whole run already; leave out the recipe {recipe!r}")
    base = recipes.trial(base) if tries else base
    if words:
        if base.data.data not in _READ_FOLDERS and "data" not in given:
            raise UsageError(f"{words[0]}: the recipe {base.recipe} reads no folder; type --data folder as well")
        given.setdefault("data_dir", words[0])
    if words[1:]:
        raise UsageError(f"unexpected {words[1]!r}: leave it out")
    if "batch_size" in given:
        given.setdefault("global_batch_size", None)  # a batch size per worker decides it
    given_way = _give_way(base, given)
    config = base.replace(**given)
    for note in given_way if notes and launcher.speaks(os.environ) else ():
        console.say(note)
    if "data_dir" in given and config.data.data in ("digits", "synthetic"):
        raise UsageError(f"--data {config.data.data} reads no --data-dir: add --data folder for images of yours")
    if path is not None and not trust:
        named = {name: base.settings()[name] for name in plugin.NAMES_CODE}
        named["copy_to"] = base.run.copy_to or ""
        plugin.check_trusted(path, {name: value for name, value in named.items() if name not in given})
    return config


def _unnamed(given: Mapping[str, Any]) -> Config:
    """Return the settings to start from without a recipe: plain ones for code of the user's own."""
    if not any(plugin.is_reference(given.get(name, "")) for name in ("model", "data", "task")):
        return recipes.get(recipes.DEFAULT)
    begun = Path(given.get("output_dir", ""), run_folder.CONFIG)
    if "output_dir" in given and begun.exists() and config_file.load(begun).recipe == recipes.DEFAULT:
        return recipes.get(recipes.DEFAULT)  # a run of an earlier version continues
    return recipes.plain()


def _give_way(base: Config, given: dict[str, Any]) -> list[str]:
    """Change what a recipe has set if it does not go with the flags; return a note for each change."""
    epochs = whole_number(given.get("epochs", ""))
    schedule = base.schedule
    notes = []
    if epochs and epochs < schedule.warmup_epochs and "warmup_epochs" not in given:
        given["warmup_epochs"] = shorter = schedule.warmup_epochs * epochs / schedule.epochs
        was = f"the recipe's warm-up of {schedule.warmup_epochs:g} epochs"
        notes.append(f"--epochs {epochs}: {was} becomes {shorter:g}")
    if base.optimizer.nesterov and "nesterov" not in given and given.get("optimizer") not in (None, "sgd", "lars"):
        notes.append(f"--optimizer {given['optimizer']}: the recipe's --nesterov is left out")
        given["nesterov"] = False
    return notes
