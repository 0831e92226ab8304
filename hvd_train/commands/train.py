"""`hvd-train train`: what was typed becomes a config, and the result of the training an exit code."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hvd_train import config_file, console, plugin, recipes, remote_url
from hvd_train.config import GROUPS, Config
from hvd_train.console import PROGRAM
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags, take
from hvd_train.help_page import Flag, Page, Section, flags_of
from hvd_train.launch import roll_call, start
from hvd_train.launch.error_report import say_once
from hvd_train.numerals import whole_number
from hvd_train.run_files import destinations, run_folder

USAGE = """\
  train [RECIPE] [FLAGS]   train a model, on several ranks with --np N
"""
# What people type from other trainers: flags that have another name here, and flags that are the launcher's business.
ALIASES = {
    "-a": "--model",
    "--arch": "--model",
    "-b": "--batch-size",
    "--b": "--batch-size",
    "--desired-acc": "--target-accuracy",
    "--fast-dev-run": "--trial",
    "-j": "--workers",
    "--lr": "--learning-rate",
    "-np": "--np",
    "--try": "--trial",
}
TRUST = Flag(("--trust",), text="Import the code that the file of --config names: it can do here whatever you can.")
_MOST_USED = (
    *("data", "data_dir", "download", "task", "model", "epochs", "batch_size", "global_batch_size", "learning_rate"),
    *("optimizer", "precision", "device", "workers", "output_dir", "resume", "max_time"),
)
RANKS = ("-n", "--np", "--num-proc", "--nproc", "--nproc-per-node", "--world-size", "--gpus", "--num-gpus")
OF_LAUNCHERS = (
    *(*RANKS, "-H", "--host", "--hosts", "--hostfile", "--hosts-file", "--nodes", "--num-nodes", "--nnodes"),
    *("--rank", "--local-rank", "--node-rank", "--dist-url", "--dist-backend", "--master-addr", "--master-port"),
    "--multiprocessing-distributed",
)


def run(arguments: list[str]) -> int:
    """Train and return the exit code.

    That is 0 for a finished run, 128 + N where signal N stopped it, 75 (EX_TEMPFAIL) where a time limit did, and 74
    (EX_IOERR) where its last files could not be written. With --np or --hosts this process becomes the launcher.
    Raises UsageError for settings that cannot give a run.
    """
    console.outlive()
    ranks, arguments = start.take_ranks([_renamed(argument) for argument in arguments], os.environ)
    if ranks is not None:
        # A mistake is told before any rank starts; the ranks will tell the notes.
        config, _ = read_train(list(arguments), "train")
        if ranks.host_file is None:  # else this may be a machine without what the ranks have
            destinations.check(config.run.log_to)
        start.become_launcher(ranks, ["train", *arguments], os.environ)
    settings = parse_train(arguments)
    roll_call.started(os.environ)
    # This imports torch, which parsing can do without. The import makes objects that live to the end; a fifth of its
    # time would go into searching them for garbage, again and again.
    gc.disable()
    from hvd_train.run import train

    gc.freeze()
    gc.enable()
    try:
        result = train(settings)
    finally:
        gc.unfreeze()  # otherwise extensions that count the objects they leave behind complain at exit
    if not result.saved:
        return os.EX_IOERR
    if result.finished:
        return 0
    return 128 + result.stopped_by if result.stopped_by else os.EX_TEMPFAIL


def page(arguments: list[str]) -> Page:
    """Return the help, in which the defaults are those of the recipe or the file that `arguments` name.

    Raises UsageError where there is no such recipe or file.
    """
    base, _, _ = _base([_renamed(argument) for argument in arguments])
    aliases = {flag: [alias for alias, known in ALIASES.items() if known == flag] for flag in ALIASES.values()}
    own = flags_of(Config, base, aliases)
    groups = {name: flags_of(cls, getattr(base, name), aliases) for name, cls in GROUPS.items()}
    of_all = {name: flag for group in groups.values() for name, flag in group.items()}
    known = [
        Flag((name,), text=(inspect.getdoc(make) or "").partition("\n")[0]) for name, make in recipes.RECIPES.items()
    ]
    config = Flag(
        ("--config",), "FILE", "Start from this config.yaml instead of a recipe, such as that of an earlier run."
    )
    rest = [
        Section(
            f"{name} flags",
            tuple(flag for field, flag in group.items() if field not in _MOST_USED),
            inspect.getdoc(GROUPS[name]) or "",
        )
        for name, group in groups.items()
    ]
    return Page(
        "train [RECIPE] [FLAGS]",
        "Train a model, on one rank or many. Whatever stops a run, the same command goes on from there. "
        f"(The defaults below are those of the recipe {base.recipe}.)",
        (
            Section(f"RECIPE, a complete configuration (default: {recipes.DEFAULT})", tuple(known)),
            Section("ranks", start.FLAGS),
            Section("most used flags", tuple(of_all[field] for field in _MOST_USED)),
            Section("other flags", (config, own["recipe"], own["seed"])),
            *rest,
        ),
        (
            f"{PROGRAM} train digits --epochs 5",
            f"{PROGRAM} train imagenet-resnet50 --data-dir DATA --np 8",
        ),
    )


def parse_train(arguments: list[str], command: str = "train", *, trust: bool = True) -> Config:
    """Return the config of `hvd-train train ...`, as `read_train` does, and say its notes."""
    config, notes = read_train(arguments, command, trust=trust)
    for note in notes:
        say_once(note)
    return config


def read_train(arguments: list[str], command: str, *, trust: bool = True) -> tuple[Config, list[str]]:
    """Return the config of `hvd-train train ...`, and notes on it.

    That is a recipe, --config FILE or, with neither, the run that --resume names, changed by the flags.

    `command` is named in errors and in the help. Without `trust`, as in commands that do not train, the file
    must not name code that no flag names. Raises UsageError for an unknown recipe, flag or value.
    """
    arguments = _split_lists([_renamed(argument) for argument in arguments])
    for flag in ("--optimizer-args", "--task-args", "--data-columns"):
        arguments = _gathered(flag, arguments)
    base, path, arguments = _base(arguments)
    flags = _typed(arguments)
    if launcher_flag := next((flag for flag in OF_LAUNCHERS if flag in flags), None):
        raise _for_launchers(launcher_flag, arguments, command)
    if flags.get("--data", "").startswith(plugin.HUGGING_FACE) and "--data-dir" in flags:
        raise UsageError(f"--data {flags['--data']} names its folder already: leave --data-dir out")
    if "--batch-size" in flags and "--global-batch-size" not in flags:
        # A batch size per worker decides the global one. The 1 stands in until the flag is read.
        batch = dataclasses.replace(base.batch, batch_size=base.batch.batch_size or 1, global_batch_size=None)
        base = dataclasses.replace(base, batch=batch)
    if "--workers" in flags and "--workers-per-host" not in flags:
        base = base.replace(workers_per_host=None)
    base, notes = recipes.give_way(base, flags) if path is None else (base, [])
    parsed = parse_flags(Config, arguments, f"{PROGRAM} {command}", default=base)
    if path is not None and not trust:
        in_file, used = _code_named(base), _code_named(parsed)
        plugin.check_trusted(str(path), {name: value for name, value in used.items() if value == in_file[name]})
    optimizer = parsed.optimizer.optimizer
    if "--momentum" in flags and plugin.is_reference(optimizer):
        told = f"--momentum has no effect on --optimizer {optimizer}"
        raise UsageError(f"{told}: type --optimizer-args momentum={flags['--momentum']} if it takes one")
    return (recipes.suited(parsed) if path is None and "--learning-rate" not in flags else parsed), notes


def _base(arguments: list[str]) -> tuple[Config, Path | None, list[str]]:
    """Return the config that flags change, the file it is from or None for a recipe, and the arguments left.

    Where neither is named, it is the run that --resume names, if it is one. Raises UsageError where there is no such
    recipe or file, and where both are named.
    """
    file, arguments = take(arguments, "--config", "the path of a config.yaml")
    recipe, arguments = _recipe(arguments)
    flags = _typed(arguments)
    here: dict[str, Any] = dict.fromkeys(("output_dir", "log_dir", "cache_dir", "tuned", "profile"))
    if file is None and recipe is None and (url := remote_url.url_of(flags.get("--resume", ""))):
        return _config_at(url).replace(resume="auto", **here), Path(url), arguments
    resumed = Path(flags["--resume"], run_folder.CONFIG) if "--resume" in flags else None
    if file is None and recipe is None and resumed is not None and resumed.is_file():
        if run_folder.is_foreign(resumed.parent):
            raise UsageError(
                f"{resumed.parent} belongs to another user, whose settings are not taken unasked: if you trust them, "
                f"type --config {resumed} --output-dir {resumed.parent}"
            )
        # The run's own settings, but for its folders, which may have been moved.
        return config_file.load(resumed).replace(resume="auto", **here), resumed, arguments
    if file is None:
        return recipes.get(recipe or recipes.DEFAULT), None, arguments
    if recipe is not None:
        raise UsageError(f"--config {file} is a whole run already; leave out the recipe {recipe!r}")
    return config_file.load(Path(file)), Path(file), arguments


def _config_at(url: str) -> Config:
    """Return the settings of the run at a URL. Raises UsageError where there is none, or it cannot be reached."""
    from hvd_train.run_files import remote

    remote.check(url, "--resume")
    with TemporaryDirectory(prefix="hvd_train-") as folder:
        remote.fetch_newest(url, Path(folder), lambda name: name == run_folder.CONFIG, lambda note: None)
        return config_file.load(Path(folder, run_folder.CONFIG))


def _recipe(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Take the recipe, the first argument or that of --recipe, out of the arguments; None where none was typed.

    Raises UsageError where two are named.
    """
    first = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    flagged, arguments = take(arguments, "--recipe", "the name of a recipe")
    if first is not None and flagged is not None:
        raise UsageError(f"{first!r} and --recipe {flagged} both name the recipe; leave out one of them")
    if again := take(arguments, "--recipe", "the name of a recipe")[0]:
        raise UsageError(f"--recipe {flagged} and --recipe {again} both name the recipe; leave out one of them")
    return flagged or first, arguments


def _typed(arguments: list[str]) -> dict[str, str]:
    """Return the flags among the arguments, each with the text of its value."""
    typed = {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        flag, equals, value = argument.partition("=")
        typed[flag] = value if equals else following
    return typed


def _for_launchers(flag: str, arguments: list[str], command: str) -> UsageError:
    """Return the error for a flag of launchers, with the line to type instead."""
    number = whole_number(take(arguments, flag, "a number")[0] or "") if flag in RANKS else None
    ranks = number or 4
    if command == "config":
        return UsageError(f"{flag}: config starts no ranks; leave it out")
    if command == "show-data":
        return UsageError(f"{flag}: show-data starts no ranks; type `{PROGRAM} show-data --ranks {ranks} ...`")
    gpus = "; --gpu-ids 0,1 chooses among the GPUs of a host" if "gpu" in flag else ""
    if command == "train":
        line = f"`{PROGRAM} train --np {ranks} ...`, on several hosts with --hosts FILE"
        return UsageError(f"{flag}: ranks are started by {line}{gpus}")
    if command in ("tune", "bench scaling"):
        numbers = "1,2,4" if number is None and command == "bench scaling" else ranks
        why = f"{command} starts its ranks itself"
        line = f"{PROGRAM} {command} --np {numbers} ..."
        hosts = "--hosts FILE"
    else:
        why = "the launcher says how many ranks there are and which one this is"
        line = f"{'mpirun' if command == 'sweep' else 'horovodrun'} -np {ranks} {PROGRAM} {command} ..."
        hosts = "-H host1:4,host2:4"
    return UsageError(f"{flag}: {why}; type `{line}`, on several hosts with {hosts}{gpus}")


def _code_named(config: Config) -> dict[str, str]:
    """Return the settings that may name the user's own code."""
    names = {"model": config.model.model, "data": config.data.data, "task": config.task.task}
    return {**names, "optimizer": config.optimizer.optimizer, "schedule": config.schedule.schedule}


def _split_lists(arguments: list[str]) -> list[str]:
    """Split the value of a flag that takes a list at its commas: `--gpu-ids 0,1` becomes `--gpu-ids 0 1`."""
    result: list[str] = []
    for argument in arguments:
        if argument.startswith("--gpu-ids="):
            result += ["--gpu-ids", *argument.partition("=")[2].split(",")]
        elif result[-1:] == ["--gpu-ids"]:
            result += argument.split(",")
        else:
            result.append(argument)
    return result


def _gathered(flag: str, arguments: list[str]) -> list[str]:
    """Bring the values of a flag that was typed more than once together, behind all other arguments.

    The flag stays without any, too.
    """
    values: list[str] = []
    others: list[str] = []
    takes = typed = False
    for argument in arguments:
        name, _, value = argument.partition("=")
        takes = name == flag or (takes and not argument.startswith("-"))
        if not takes:
            others.append(argument)
        elif name != flag:
            values.append(argument)
        else:
            typed = True
            values += [value] if value else []
    return [*others, flag, *values] if typed else others


def _renamed(argument: str) -> str:
    """Give a flag the name it has here: `--batch_size=3` and `-b=3` become `--batch-size=3`."""
    flag, equals, value = argument.partition("=")
    if not flag.startswith("-"):
        return argument
    flag = flag.replace("_", "-")
    return ALIASES.get(flag, flag) + equals + value
