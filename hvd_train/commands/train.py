"""`hvd-train train` and `config`, and the settings that their flags and other commands' name."""

import gc
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from hvd_train import config_file, console, plugin, recipes
from hvd_train.config import Config
from hvd_train.console import PROGRAM
from hvd_train.errors import UsageError, whole_number
from hvd_train.launch import launcher, roll_call

_READ_FOLDERS = "folder", "cifar10", "cifar100"
SETTINGS = Config().settings().keys()


def train(options: Namespace) -> int:
    """Train and return the exit code. Raises UsageError for wrong settings.

    The code is 0 for a finished run, 128 + N if signal N stopped it, 75 (EX_TEMPFAIL) if its
    launcher did, and 74 (EX_IOERR) if its last files could not be written.
    """
    settings = settings_of(options)
    roll_call.started(os.environ)
    # a fifth of the time of this import would go into searching objects that live to the end for
    # garbage
    gc.disable()
    from hvd_train import run

    gc.freeze()  # nor would it be searched later: 0.1 s in each ten thousand small steps
    gc.enable()
    return run.train(settings).exit_code


def config(options: Namespace) -> int:
    """Check the settings, print them as YAML and return 0. Raises UsageError for wrong settings."""
    settings = settings_of(options, trust=options.trust)
    from hvd_train.run import check  # imports torch

    check(settings)
    print(config_file.dump(settings), end="")
    return 0


def check_local(config: Config, options: Namespace) -> None:
    """Raise UsageError if the output of a command that has several runs is one
    URL, or lies below a file.
    """
    if config.run.copy_to:
        url = config.run.copy_to
        what = f"{PROGRAM} {options.name} has several runs"
        raise UsageError(f"{what}, and {url} is for one: name a folder")
    folder = config.run.output_dir
    if folder and (file := next(filter(Path.is_file, [folder, *folder.parents]), None)):
        raise UsageError(f"--output-dir {file} is a file: name a folder")


def settings_of(options: Namespace, *, trust: bool = True, notes: bool = True) -> Config:
    """Return the settings of a command line: those of a recipe or file, changed by flags.

    Without `trust` the file must name no code or URL that no flag names. Raises UsageError.
    """
    given = {name: value for name, value in vars(options).items() if name in SETTINGS}
    for word in options.words[2:]:
        raise UsageError(f"unexpected {word!r}: leave it out")
    recipe, folder = [*options.words, None, None][:2]
    base = _base(options, recipe, given)
    if folder is not None:
        if "data_dir" in given:
            raise UsageError(
                f"{folder} and --data-dir {given['data_dir']} are two folders: name one"
            )
        if base.data.data not in _READ_FOLDERS and "data" not in given:
            what = f"the recipe {base.recipe} reads no folder"
            raise UsageError(f"{folder}: {what}; type --data folder as well")
        given["data_dir"] = folder
    if "batch_size" in given:
        given.setdefault("global_batch_size", None)  # a batch size per worker decides it
    dropped = _drop_defaults_in_conflict(base, given)
    config = base.replace(**given)
    if notes and launcher.prints():
        for note in dropped:
            console.say(note)
    if "data_dir" in given and config.data.data in ("digits", "synthetic"):
        raise UsageError(
            f"--data {config.data.data} reads no --data-dir: add --data folder for images of yours"
        )
    if options.config is not None and not trust:
        named = {name: base.settings()[name] for name in plugin.NAMES_CODE}
        named["copy_to"] = base.run.copy_to or ""
        untyped = {name: value for name, value in named.items() if name not in given}
        plugin.check_trusted(options.config, untyped)
    return config


def _base(options: Namespace, recipe: str | None, given: dict[str, Any]) -> Config:
    """Return the settings that flags change: of --config FILE, a recipe,
    or plain ones for own code.
    """
    flag = given.pop("recipe", None)
    if recipe is None:
        recipe = flag
    elif flag not in (None, recipe):
        raise UsageError(f"{recipe} and --recipe {flag} are two recipes: name one")
    if "/" in (recipe or ""):
        example = f"{PROGRAM} {options.name} imagenet-resnet50 {recipe}"
        raise UsageError(f"{recipe} is no recipe; name one first: {example}")
    if options.config is None:
        is_own = any(plugin.is_reference(given.get(name, "")) for name in ("model", "data", "task"))
        unnamed = recipes.plain() if is_own else recipes.get(recipes.DEFAULT)
        base = unnamed if recipe is None else recipes.get(recipe)
    elif recipe is None:
        base = config_file.load(options.config)
    else:
        what = f"--config {options.config} is a whole run already"
        raise UsageError(f"{what}; leave out the recipe {recipe!r}")
    return recipes.trial(base) if options.tries else base


def _drop_defaults_in_conflict(base: Config, given: dict[str, Any]) -> list[str]:
    """Change what a recipe has set if it does not go with the flags;
    return a note for each change.
    """
    epochs = whole_number(given.get("epochs", ""))
    schedule = base.schedule
    notes = []
    if epochs and epochs < schedule.warmup_epochs and "warmup_epochs" not in given:
        given["warmup_epochs"] = shorter = schedule.warmup_epochs * epochs / schedule.epochs
        was = f"the recipe's warm-up of {schedule.warmup_epochs:g} epochs"
        notes.append(f"--epochs {epochs}: {was} becomes {shorter:g}")
    if (
        base.optimizer.nesterov
        and "nesterov" not in given
        and given.get("optimizer") not in (None, "sgd", "lars")
    ):
        notes.append(f"--optimizer {given['optimizer']}: the recipe's --nesterov is left out")
        given["nesterov"] = False
    return notes
