"""The front door, `hvd-train COMMAND`. Only here the process ends and errors become lines."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import socket
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hvd_train import __version__, config, horovodrun, hosts, launch, ledger, rank_log, recipes, roll_call, tune
from hvd_train.config import Config
from hvd_train.errors import HvdTrainError, RankLost, UsageError, unknown_name
from hvd_train.flags import parse_flags, taken

if TYPE_CHECKING:
    from hvd_train import report

PROGRAM = "hvd-train"
_LAUNCHER_SECONDS = 10.0  # ranks of one host can be seconds apart while they import
# What people type from other trainers: the same by another name, and what the launcher says here.
ALIASES = {
    "-a": "--model",
    "--arch": "--model",
    "-b": "--batch-size",
    "--checkpoint": "--resume",
    "--desired-acc": "--target-accuracy",
    "-j": "--workers",
    "--lr": "--learning-rate",
}
OF_LAUNCHERS = (
    *("--world-size", "--rank", "--local-rank", "--node-rank", "--nnodes", "--nproc-per-node"),
    *("--dist-url", "--dist-backend", "--master-addr", "--master-port", "--multiprocessing-distributed"),
)

USAGE = f"""usage: {PROGRAM} COMMAND ...

  train [RECIPE] [flags]   train; RECIPE is one of: {", ".join(recipes.RECIPES)} (default: {recipes.DEFAULT})
  evaluate RUN|CHECKPOINT  scores of a run's best weights, or of a checkpoint file
  config [RECIPE] [flags]  check the settings of `train` and print them, as --config FILE takes them
  audit RUN                whether every sample counted exactly once (of a run with --ledger)
  show-data [RECIPE] [flags] [--ranks N] [--output FILE.png]
                           a picture of an augmented batch, and each rank's share of the classes
  sweep [RECIPE] [flags] [--workers-per-run N]
                           a training for each combination of values with commas (--lr 0.1,0.05), side by side
  bench TOOL ...           measure: throughput, allreduce, input, scaling (`{PROGRAM} bench` says more)
  export RUN|CHECKPOINT    weights and a program of the trained model (torch.export; ONNX with --onnx)
  tune [RECIPE] [flags] [--np N] [--hosts FILE] [--controller gloo|mpi] [--output FILE]
                           Horovod's settings for these hosts, this model and batch, for `train --tuned FILE`
  report RUN [RUN ...] [--output FILE.html] [--no-predictions]
                           one page about runs: curves, throughput, differences, predictions; opens anywhere
  watch RUN [--once]       a running or finished training as it stands, in the terminal
  hosts FILE               check a host file, and write it as Open MPI, MPICH or Slurm take it
  doctor                   what this machine and this build of Horovod can do
  --version                {__version__}

`{PROGRAM} COMMAND --help` lists the flags. On several ranks: horovodrun -np 2 {PROGRAM} train
"""


@dataclass(frozen=True)
class EvaluateOptions:
    """Scores of a run's best weights, or of a checkpoint file: loss, top-1, top-5 and top-1 of each class."""

    target: Annotated[Path, tyro.conf.Positional]
    """Run folder or checkpoint file."""
    json: bool = False
    """Print one JSON object, with every digit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""


@dataclass(frozen=True)
class AuditOptions:
    """Whether every sample counted exactly once in every finished epoch, by ledger.jsonl; exit code 1 if not."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder of a training with --ledger."""


@dataclass(frozen=True)
class ExportOptions:
    """A run's best weights, or a checkpoint's, for use elsewhere: weights.pt, model.pt2 (torch.export), model.json."""

    target: Annotated[Path, tyro.conf.Positional]
    """Run folder or checkpoint file."""
    output: Path | None = None
    """Folder for the files; default: RUN/export, or CHECKPOINT.export."""
    onnx: bool = False
    """Write model.onnx, too (pip install onnx onnxscript onnxruntime)."""


@dataclass(frozen=True)
class ReportOptions:
    """One HTML page, complete in itself, about one run or many: what they reached, and how they differ."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders; a folder of `bench scaling` brings its table and plots."""
    output: Path = Path("report.html")
    """The page; an earlier report of this name is replaced, no other file is."""
    predictions: bool = True
    """Work out the confusion matrix and the worst images from the best weights (needs torch and the data)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models run for that."""


@dataclass(frozen=True)
class WatchOptions:
    """A running or finished training as its files tell it; ends when the run has."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    once: bool = False
    """Print how it stands, and end (as without a terminal)."""
    interval: float = 1.0
    """Seconds from one look to the next."""


@dataclass(frozen=True)
class HostsOptions:
    """Check a host file (form, hosts named twice, slots, names that resolve here), or write it in another form."""

    file: Annotated[Path, tyro.conf.Positional]
    """Host file."""
    to: hosts.Form | None = None
    """Print it in this form: horovod and openmpi are NAME slots=N, mpich is NAME:N, slurm a line for each task."""
    form: hosts.Form = "horovod"
    """Form of the file; those of horovod, openmpi and mpich are all understood."""
    resolve: bool = True
    """Ask whether the names are known here."""


def main() -> None:
    """Console entry point: runs the command and exits with its code."""
    rank_log.whole_lines()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command; the exit code. An error made on purpose is one line on stderr, once for all ranks."""
    commands = {
        "train": _train,
        "evaluate": _evaluate,
        "audit": _audit,
        "config": _config,
        "show-data": _show_data,
        "sweep": _sweep,
        "bench": _bench,
        "export": _export,
        "tune": _tune,
        "report": _report,
        "watch": _watch,
        "hosts": _hosts,
        "doctor": _doctor,
    }
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(USAGE, end="")
            return 0 if arguments else 2
        if arguments[0] == "--version":
            print(f"{PROGRAM} {__version__}")
            return 0
        if arguments[0] not in commands:
            raise unknown_name("command", arguments[0], commands)
        return commands[arguments[0]](list(arguments[1:]))
    except HvdTrainError as error:
        _complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _train(arguments: list[str]) -> int:
    settings = parse_train(arguments)
    roll_call.started(os.environ)
    # This imports torch, which parsing can do without. It makes objects that stay, and to look through them again and
    # again for some to throw away takes a fifth of the time.
    gc.disable()
    from hvd_train.run import train

    gc.freeze()
    gc.enable()
    try:
        result = train(settings)
    finally:
        gc.unfreeze()  # extensions that count what they have left behind complain at the end else
    if result.finished:
        return 0 if result.saved else 1
    return 128 + result.stopped_by if result.stopped_by else os.EX_TEMPFAIL


def parse_train(arguments: list[str], command: str = "train") -> Config:
    """The config of `hvd-train train ...`: a recipe or --config FILE, changed by the flags.

    Raises UsageError for an unknown recipe, flag or value.
    """
    arguments = _lists([_usual(argument) for argument in arguments])
    file, arguments = taken(arguments, "--config", "the path of a config.yaml")
    path = None if file is None else Path(file)
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if path is None:
        base = recipes.get(recipe or recipes.DEFAULT)
    elif recipe is None:
        base = config.load(path)
    else:
        raise UsageError(f"--config {path} is a whole run already; leave out the recipe {recipe!r}")
    given = {argument.partition("=")[0] for argument in arguments}
    if launcher_flag := next((flag for flag in OF_LAUNCHERS if flag in given), None):
        raise UsageError(
            f"{launcher_flag}: the launcher says how many ranks there are and which one this is; type "
            f"`horovodrun -np 4 {PROGRAM} {command} ...`, on several hosts with -H host1:4,host2:4"
        )
    if "--batch-size" in given and "--global-batch-size" not in given:
        batch = dataclasses.replace(base.batch, batch_size=base.batch.batch_size or 1, global_batch_size=None)
        base = dataclasses.replace(base, batch=batch)  # a batch size per worker decides the global one
    if "--workers" in given and "--workers-per-host" not in given:
        base = base.replace(workers_per_host=None)
    names = "|".join(recipes.RECIPES)
    parsed = parse_flags(Config, arguments, f"{PROGRAM} {command} [{names}] [--config FILE]", default=base)
    return recipes.suited(parsed) if path is None and "--learning-rate" not in given else parsed


def _evaluate(arguments: list[str]) -> int:
    options = parse_flags(EvaluateOptions, arguments, f"{PROGRAM} evaluate")
    from hvd_train.run import connect, evaluate  # imports torch, which parsing can do without

    world = connect()
    scores = evaluate(options.target, world=world, device=options.device)
    if world.place.rank != 0:
        return 0
    if options.json:
        print(json.dumps(scores.as_dict()))
        return 0
    print(f"loss {scores.loss:.6f}  top-1 {scores.top1:.4%}  top-5 {scores.top5:.4%}  ({scores.count:,} images)")
    for name, share in zip(scores.classes, scores.per_class, strict=True):
        print(f"  {name:<20} {share:8.2%}")
    return 0


def _audit(arguments: list[str]) -> int:
    options = parse_flags(AuditOptions, arguments, f"{PROGRAM} audit")
    verdict = ledger.audit(options.run)
    print(verdict)
    return 1 if verdict.faults else 0


def _config(arguments: list[str]) -> int:
    settings = parse_train(arguments, "config")
    from hvd_train.run import check  # imports torch, which parsing can do without

    check(settings)
    print(config.dump(settings), end="")
    return 0


def _show_data(arguments: list[str]) -> int:
    ranks, arguments = taken(arguments, "--ranks", "a number of ranks")
    output, arguments = taken(arguments, "--output", "the path of a picture")
    if ranks is not None and not (ranks.isdigit() and int(ranks)):
        raise UsageError(f"--ranks {ranks}: it must be a number from 1 on")
    settings = parse_train(arguments, "show-data")
    from hvd_train.run import check  # imports torch, which parsing can do without
    from hvd_train.show_data import show

    check(settings)
    print(show(settings, int(ranks or 1), Path(output or "show-data.png")))
    return 0


def _sweep(arguments: list[str]) -> int:
    workers, arguments = taken(arguments, "--workers-per-run", "a number of workers")
    output, arguments = taken(arguments, "--output-dir", "a folder")
    if workers is not None and not (workers.isdigit() and int(workers)):
        raise UsageError(f"--workers-per-run {workers}: it must be a number from 1 on")
    from hvd_train import sweep  # imports torch, which parsing can do without

    folder = Path(output or f"runs/sweep-{zlib.crc32(' '.join(arguments).encode()):08x}")  # the same command's
    todo = sweep.trials(arguments, lambda words: parse_train(words, "sweep"), folder)
    return sweep.run(todo, int(workers or 1), folder)


def _bench(arguments: list[str]) -> int:
    from hvd_train.bench import command

    return command.main(arguments, parse_train)


def _export(arguments: list[str]) -> int:
    options = parse_flags(ExportOptions, arguments, f"{PROGRAM} export")
    from hvd_train.export import export  # imports torch, which parsing can do without

    target = options.target
    usual = target / "export" if target.is_dir() else target.with_name(f"{target.name}.export")
    for path in export(target, options.output or usual, onnx=options.onnx):
        print(path)
    return 0


def _tune(arguments: list[str]) -> int:
    if launch.launched(os.environ) is not None:
        return _turn(arguments)
    values: dict[str, str | None] = {}
    for flag in ("--np", "--hosts", "--controller", "--output", "--turns", "--seconds"):
        values[flag], arguments = taken(arguments, flag, "a value")
    file, controller = values["--hosts"], values["--controller"] or "gloo"
    slots = 2 if file is None else sum(host.slots for host in hosts.read(Path(file)))
    if controller not in ("gloo", "mpi"):
        raise UsageError(f"--controller {controller}: it must be gloo or mpi")
    ranks, turns = _number("--np", values["--np"] or str(slots)), _number("--turns", values["--turns"] or "8")
    seconds = _number("--seconds", values["--seconds"] or "3", least=1)
    parse_train(list(arguments), "tune")  # a mistake is told before any rank starts
    path = Path(values["--output"] or "tuned.env")
    tune.check(path)
    line = horovodrun.line(ranks, file, controller)
    tune.tune(tune.Ranks(line, [sys.argv[0], "tune", *arguments], seconds), path, turns, print)
    return 0


def _turn(arguments: list[str]) -> int:
    """One rank's part in a turn of `tune`."""
    seconds = os.environ.get(tune.TURN)
    if seconds is None:
        raise UsageError(f"tune starts the ranks by itself, many times: type `{PROGRAM} tune --np N`")
    settings = parse_train(arguments, "tune")
    roll_call.started(os.environ)
    from hvd_train import turn  # imports torch, which parsing can do without

    turn.take(settings, float(seconds))
    return 0


def _number(flag: str, text: str, least: int = 2) -> int:
    if not (text.isdigit() and int(text) >= least):
        raise UsageError(f"{flag} {text}: it must be a number from {least} on")
    return int(text)


def _report(arguments: list[str]) -> int:
    options = parse_flags(ReportOptions, arguments, f"{PROGRAM} report")
    if not options.runs:
        raise UsageError("which runs? name at least one run folder, as in hvd-train report runs/*")
    from hvd_train import report  # imports matplotlib

    report.check_output(options.output)
    runs, scalings = report.open_all(options.runs)
    told: dict[Path, report.Predictions | str] = {}
    for run in runs:
        told[run.path] = _predicted(run.path, options.device) if options.predictions else "left out: --no-predictions"
    report.write(options.output, report.compose(runs, scalings, told, datetime.now()))
    print(f"report: {options.output}")
    return 0


def _predicted(run: Path, device: str) -> report.Predictions | str:
    """A run's predictions, or why there are none: a page is worth having without them."""
    from hvd_train.predictions import predict  # imports torch

    try:
        return predict(run, device)
    except UsageError as error:
        return f"no predictions: {error}"


def _watch(arguments: list[str]) -> int:
    options = parse_flags(WatchOptions, arguments, f"{PROGRAM} watch")
    if not options.interval > 0:
        raise UsageError(f"--interval {options.interval:g}: it must be a number of seconds above 0")
    from hvd_train import watch

    watch.watch(options.run, once=options.once or not sys.stdout.isatty(), interval_s=options.interval)
    return 0


def _hosts(arguments: list[str]) -> int:
    options = parse_flags(HostsOptions, arguments, f"{PROGRAM} hosts")
    found = hosts.read(options.file, options.form)
    if options.resolve and (unknown := hosts.unknown(found)):
        raise UsageError(f"{options.file}: unknown here: {', '.join(unknown)}; mend the name, or add it to /etc/hosts")
    print(hosts.written(found, options.to) if options.to else f"{hosts.describe(found)}\n", end="")
    return 0


def _doctor(arguments: list[str]) -> int:
    from hvd_train.doctor import main as examine

    return examine(arguments)


def _complain(error: HvdTrainError) -> None:
    """Print an error once for all ranks: by rank 0, or by the one rank that met it, with its name.

    A launcher ends all ranks when the first one ends, with that one's exit code. So whoever is not to speak for
    the job waits for that; where it does not come, nobody else has spoken.
    """
    launched = launch.launched(os.environ)
    if error.told:
        return
    if launched is None:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
    elif error.met_by is not None:
        _say_as(launched, error)
    elif launched.rank == 0:
        print(f"{PROGRAM}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, RankLost):
            _ended_by_launcher(error)
    elif not _ended_by_launcher(error):
        _say_as(launched, error)


def _say_as(launched: launch.Launch, error: HvdTrainError) -> None:
    print(f"{PROGRAM}: rank {launched.rank} on {socket.gethostname()}: {error}", file=sys.stderr)


def _ended_by_launcher(error: HvdTrainError) -> bool:
    """Wait for the launcher's SIGTERM, or for its end, which is all that ranks on other hosts see; whether it came."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    end = time.monotonic() + _LAUNCHER_SECONDS
    while time.monotonic() < end:
        if error.ending or signal.sigtimedwait({signal.SIGTERM}, 0.5) or roll_call.launcher_gone(os.environ):
            return True
    return False


def _lists(arguments: list[str]) -> list[str]:
    """`--gpu-ids 0,1` as `--gpu-ids 0 1`."""
    result: list[str] = []
    for argument in arguments:
        if argument.startswith("--gpu-ids="):
            result += ["--gpu-ids", *argument.partition("=")[2].split(",")]
        elif result[-1:] == ["--gpu-ids"]:
            result += argument.split(",")
        else:
            result.append(argument)
    return result


def _usual(argument: str) -> str:
    """A flag by its one name: `--batch_size=3` and `-b=3` are `--batch-size=3`."""
    flag, equals, value = argument.partition("=")
    if not flag.startswith("-"):
        return argument
    flag = flag.replace("_", "-")
    return ALIASES.get(flag, flag) + equals + value
