"""`hvd-train train` and `config`: commands that take a recipe and the flags of a training."""

import gc
import os
from pathlib import Path

from hvd_train import config_file, console, plugin, recipes
from hvd_train.config import Config
from hvd_train.console import PROGRAM
from hvd_train.errors import UsageError, whole_number
from hvd_train.flags import parse_flags, take
from hvd_train.launch import launcher, roll_call

# Flags of other trainers that have another name here.
ALIASES = {
    "-a": "--model",
    "--arch": "--model",
    "-b": "--batch-size",
    "--b": "--batch-size",
    "--checkpoint": "--resume",
    "--desired-acc": "--target-accuracy",
    "-j": "--workers",
    "--lr": "--learning-rate",
    "--num-workers": "--workers",
    "--print-freq": "--log-steps",
    "--total-time": "--max-time",
    "--val-batch-size": "--eval-batch-size",
    "--wd": "--weight-decay",
    "--workers-per-node": "--workers-per-host",
}
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

    Without `trust` the file must name no code that no flag names. Raises UsageError, which names `command`.
    """
    arguments = [_renamed(argument) for argument in arguments]
    options, arguments = take(arguments, config=None, recipe=None, **{"try": False})
    path, recipe = options.config and Path(options.config), options.recipe
    if arguments and not arguments[0].startswith("-"):
        named, recipe = recipe, arguments.pop(0)
        if named not in (None, recipe):
            raise UsageError(f"{recipe} and --recipe {named} are two recipes: name one")
    if "/" in (recipe or ""):
        raise UsageError(f"{recipe} is no recipe; name one first: {PROGRAM} {command} imagenet-resnet50 {recipe}")
    folder = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if path is None:
        base = recipes.get(recipes.DEFAULT if recipe is None else recipe)
    elif recipe is None:
        base = config_file.load(path)
    else:
        raise UsageError(f"--config {path} is a whole run already; leave out the recipe {recipe!r}")
    base = recipes.trial(base) if vars(options)["try"] else base
    flags = {argument.partition("=")[0] for argument in arguments}
    if folder is not None:
        if base.data.data not in _READ_FOLDERS and "--data" not in flags:
            raise UsageError(f"{folder}: the recipe {base.recipe} reads no folder; type --data folder as well")
        base = base.replace(data_dir=folder)
    for flag in flags & ELSEWHERE.keys():
        raise UsageError(f"{flag} is no flag of {command}: {ELSEWHERE[flag]}")
    if "--batch-size" in flags and "--global-batch-size" not in flags:
        # A batch size per worker decides the global one; 1 stands in until the flag is read.
        base = base.replace(batch_size=base.batch.batch_size or 1, global_batch_size=None)
    if "--workers" in flags and "--workers-per-host" not in flags:
        base = base.replace(workers_per_host=None)
    base, given_way = _giving_way(base, arguments)
    parsed = parse_flags(Config, arguments, f"{PROGRAM} {command} [RECIPE] [DATA_DIR] [--config FILE]", base, _ABOUT)
    for note in given_way if notes and launcher.speaks(os.environ) else ():
        console.say(note)
    if "--data-dir" in flags and parsed.data.data in ("digits", "synthetic"):
        raise UsageError(f"--data {parsed.data.data} reads no --data-dir: add --data folder for images of yours")
    if path is not None and not trust:
        used, in_file = ({name: str(of.settings()[name]) for name in plugin.NAMES_CODE} for of in (parsed, base))
        plugin.check_trusted(str(path), {name: value for name, value in used.items() if value == in_file[name]})
    return recipes.suited(parsed) if path is None and "--learning-rate" not in flags else parsed


def _giving_way(base: Config, arguments: list[str]) -> tuple[Config, list[str]]:
    """Return the config without what does not go with the arguments, unless they set it, and a note for each change."""
    options, _ = take(arguments, epochs=None, warmup_epochs=None, optimizer=None)
    epochs, schedule = whole_number(options.epochs or ""), base.schedule
    notes = []
    if epochs and options.warmup_epochs is None and epochs < schedule.warmup_epochs:
        shorter = schedule.warmup_epochs * epochs / schedule.epochs
        was = f"the recipe's warm-up of {schedule.warmup_epochs:g} epochs"
        notes.append(f"--epochs {epochs}: {was} becomes {shorter:g}")
        base = base.replace(warmup_epochs=shorter)
    nesterov = base.optimizer.nesterov and not {"--nesterov", "--no-nesterov"} & {*arguments}
    if nesterov and options.optimizer not in (None, "sgd", "lars"):
        notes.append(f"--optimizer {options.optimizer}: the recipe's --nesterov is left out")
        base = base.replace(nesterov=False)
    return base, notes


def _renamed(argument: str) -> str:
    """Give a flag its name here: `--batch_size=3` and `-b=3` become `--batch-size=3`."""
    flag, equals, value = argument.partition("=")
    if not flag.startswith("-"):
        return argument
    flag = flag.replace("_", "-")
    return ALIASES.get(flag, flag) + equals + value
