"""All commands of `hvd-train` and their flags: one tree of parsers, which also prints each help."""

import textwrap
from argparse import REMAINDER, SUPPRESS, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hvd_train import recipes
from hvd_train._version import __version__
from hvd_train.console import PROGRAM
from hvd_train.errors import Parser, UsageError, from_one, from_zero, unknown_name
from hvd_train.flags import ELSEWHERE, add_settings

RANKED = ("train", "evaluate", "replay", "bench throughput")
"""The commands that several ranks may run together."""
_TRAIN = f"""Train a recipe, changed by flags.

    {PROGRAM} train digits --np 2 --epochs 5 --output-dir runs/mine

`{PROGRAM} --help` lists the recipes. Flags that are used most:
--epochs, --batch-size, --learning-rate, --model, --weights, --data,
--data-dir, --output-dir."""
_LAUNCH = f"""Start the ranks of a training: here, over ssh, with mpirun, Slurm, Docker.

  {PROGRAM} launch --np 4 -- train digits
  {PROGRAM} launch -- python mine.py
  {PROGRAM} launch --hosts hosts -- train digits
  {PROGRAM} launch --elastic --hosts hosts -- train digits
  {PROGRAM} launch --with docker --hosts hosts -- train digits

`{PROGRAM} train digits --np 4` is short for the first line."""
_PROVE = f"""Run a script alone, resumed, on several ranks, and with a worker killed, and compare.

The script takes the flags of a run (`hvd_train.parse_args`), or is `{PROGRAM} train`.
Exit code 1 if results differ. Keep it short: rounding grows with each step."""
_WAYS = ("gloo", "mpi", "mpirun", "slurm", "docker", "apptainer")
_HOSTS = "a host file with lines `NAME slots=N`, or a list h1:4,h2:4"
_RUN = "run folder; default: the newest run"
_TARGET = "run folder, checkpoint or model-best.pt of a run; default: the newest run"
_TRUST = "use code, hf: data and URLs that the run names; code runs with your permissions"


def read(arguments: Sequence[str]) -> Namespace:
    """Return the options of a command, its `name` and `function`, and its arguments as `typed`.

    Raises SystemExit once a help is printed, and UsageError.
    """
    recipe = next((word for word in arguments[1:3] if word in recipes.RECIPES), recipes.DEFAULT)
    parser = tree(recipe)
    rest = list(arguments)
    while parser.commands:
        if not rest:
            parser.print_help()
            raise SystemExit(UsageError.exit_code)
        word = rest.pop(0)
        if word in ("help", "-h", "--help", "--version"):
            parser.parse_args(["--help" if word == "help" else word])
        if word in recipes.RECIPES or word.startswith("-"):
            first = f"{parser.prog} {next(iter(parser.commands))}"
            raise UsageError(f"name the command first: {first} {' '.join([word, *rest])}")
        if word not in parser.commands:
            raise unknown_name("command", word, parser.commands)
        parser = parser.commands[word]
    options = parser.read(rest)
    options.typed = rest
    return options


def without(arguments: Sequence[str], *flags: Sequence[str]) -> list[str]:
    """Return the arguments without these flags, each with all its names, and their values."""
    parser = Parser(add_help=False)
    for names in flags:
        parser.add_argument(*names)
    return parser.parse_known_args(arguments)[1]


def parsers(parser: Parser) -> Iterator[Parser]:
    """Yield this parser and those of all its commands."""
    yield parser
    for command in parser.commands.values():
        yield from parsers(command)


@cache
def tree(recipe: str = recipes.DEFAULT) -> Parser:
    """Return the parser of all commands, whose helps have the values of a recipe as defaults."""
    known = textwrap.fill(f"Recipes: {', '.join(recipes.RECIPES)}.", 79, break_on_hyphens=False)
    parser = Parser(
        prog=PROGRAM,
        formatter_class=RawDescriptionHelpFormatter,
        epilog=f"{known}\n`{PROGRAM} COMMAND --help` lists the flags of a command.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_commands()
    settings = _settings(recipe)
    _add_trainings(commands, settings)
    _add_bench(commands, settings)
    _add_launch(commands)
    _add_runs(commands)
    _add_others(commands)
    return parser


def _add(commands: Any, function: str, text: str, **options: Any) -> Parser:
    """Add the command of a function in this folder; the list of commands
    has the text's first line.
    """
    name = function.rpartition(".")[2].replace("_", "-")
    about = text.partition("\n")[0]
    parser: Parser = commands.add_parser(name, help=about, description=text, **options)
    parser.set_defaults(function=function, name=parser.prog.removeprefix(f"{PROGRAM} "))
    return parser


def _settings(recipe: str) -> dict[str, Any]:
    """Return the options of a parser that takes a recipe and the flags of a training."""
    parser = Parser(add_help=False)
    words = "the recipe to start from, then the folder of its data, if it reads one"
    parser.add_argument("words", nargs="*", metavar="RECIPE", help=words)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="read all settings from a config.yaml"
    )
    tries = "try the recipe for a minute: three steps on random images"
    parser.add_argument("--try", dest="tries", action="store_true", help=tries)
    add_settings(parser, recipes.RECIPES[recipe]())
    usage = "%(prog)s [RECIPE] [DATA_DIR] [FLAGS]"
    return {"parents": [parser], "usage": usage, "elsewhere": ELSEWHERE}


def _add_trainings(commands: Any, settings: dict[str, Any]) -> None:
    raw = RawDescriptionHelpFormatter
    train = _add(commands, "train.train", _TRAIN, formatter_class=raw, **settings)
    train.add_argument("--np", "-np", type=from_one, metavar="N", help="start N ranks here")
    train.add_argument(
        "--hosts", "-H", metavar="FILE", help=f"start ranks on all slots of {_HOSTS}"
    )

    about = "Check the settings of a training and print them, for --config FILE."
    config = _add(commands, "train.config", about, **settings)
    config.add_argument("--trust", action="store_true", help=_TRUST)

    about = """Train each combination of values, as in --lr 0.1,0.05.

    They run one after the other. A table lists the best first; exit code 1 if one failed."""
    sweep = _add(commands, "sweep.sweep", about, **settings)
    sweep.add_argument(
        "--np", "-np", type=from_one, metavar="N", help="ranks of each training (one process)"
    )
    sweep.add_argument("--hosts", "-H", metavar="FILE", help=f"start them on {_HOSTS}")


def _add_bench(commands: Any, settings: dict[str, Any]) -> None:
    about = "Measure the step, or trainings on more workers."
    tools = commands.add_parser("bench", help=about, description=about).add_commands()
    about = f"""Measure images/s of the real step, and where its time goes.

    On random images, or on --data. On two ranks: horovodrun -np 2 {PROGRAM} bench throughput"""
    throughput = _add(tools, "bench.throughput", about, **settings)
    add = throughput.add_argument
    add("--steps", type=from_one, default=20, metavar="N", help="steps of a repetition (20)")
    add(
        "--repetitions",
        type=from_one,
        default=5,
        metavar="N",
        help="how often to time the steps (5)",
    )

    about = "Train on each number of workers, which this starts; make a table."
    scaling = _add(tools, "bench.scaling", about, **settings)
    add = scaling.add_argument
    add("--np", default="", metavar="N,N,...", help="numbers of workers, as in --np 1,2,4")
    add("--hosts", metavar="FILE", help=f"the hosts of the ranks: {_HOSTS}")
    mode = "weak: the batch grows with the workers; strong: the global batch stays (weak)"
    add("--mode", choices=("weak", "strong"), default="weak", help=mode)
    add("--controller", choices=("gloo", "mpi"), default="gloo", help="of horovodrun (gloo)")
    for tool in (throughput, scaling):
        tool.add_argument("--json", type=Path, metavar="FILE", help="write the record into a file")


def _add_launch(commands: Any) -> None:
    raw = RawDescriptionHelpFormatter
    usage = "%(prog)s [FLAGS] [-- COMMAND]"
    parser = _add(commands, "launch.launch", _LAUNCH, usage=usage, formatter_class=raw)
    add = parser.add_argument
    add(
        "-n",
        "-np",
        "--np",
        type=from_one,
        metavar="N",
        help="ranks (default: all slots; here one per GPU, or 2)",
    )
    add("-H", "--hosts", metavar="FILE", help=_HOSTS)
    ways = parser.add_mutually_exclusive_group()
    way = """gloo, mpi: horovodrun; mpirun (MPIRUN_FLAGS adds flags); slurm: srun, a rank for each
    task; docker: a container on each host; apptainer: ranks in an image on this machine"""
    ways.add_argument("--with", dest="way", choices=_WAYS, default="gloo", help=way)
    for name in ("gloo", "mpi"):
        ways.add_argument(
            f"--{name}", dest="way", action="store_const", const=name, help=f"--with {name}"
        )
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable that ranks on other hosts get, too",
    )
    add("--dry-run", action="store_true", help="print the commands; run nothing")
    add(
        "--elastic",
        action="store_true",
        help="workers may die, leave and join; edit FILE while the job runs",
    )
    elastic = parser.add_argument_group("elastic jobs")
    elastic.add_argument(
        "--min-np", type=from_one, default=1, metavar="N", help="with fewer workers the others wait"
    )
    elastic.add_argument(
        "--max-np", type=from_one, metavar="N", help="the most workers (default: all slots)"
    )
    elastic.add_argument(
        "--discover", metavar="COMMAND", help="a command that prints the lines of a host file"
    )
    boxes = parser.add_argument_group("containers")
    boxes.add_argument(
        "--image", metavar="IMAGE", help="the image (hvd_train, or hvd_train.sif for Apptainer)"
    )
    boxes.add_argument(
        "--volume", action="append", default=[], metavar="FROM:TO", help="a folder of each host"
    )
    boxes.add_argument(
        "--runs", default="runs", metavar="DIR", help="the folder of each host for runs"
    )
    boxes.add_argument(
        "--port", type=from_one, default=2222, metavar="N", help="of the ssh servers inside"
    )
    batch = parser.add_argument_group("Slurm")
    batch.add_argument(
        "--requeue", action="store_true", help="in a batch job: if stopped, go back into the queue"
    )
    add("command", nargs=REMAINDER, help=SUPPRESS)


def _add_runs(commands: Any) -> None:
    about = """Score a run's best weights, or a checkpoint.

    By loss, top-1, top-5 and top-1 of each class, or the figures of its task."""
    evaluate = _add(commands, "runs.evaluate", about)
    add = evaluate.add_argument
    add("target", nargs="?", type=Path, metavar="RUN", help=_TARGET)
    folder = """another folder of the data; of class folders, the split is enough, or the folder
    holds the classes"""
    add("--data-dir", type=Path, metavar="FOLDER", help=folder)
    add(
        "--split",
        choices=("train", "val", "test"),
        default="val",
        help="the part of the data (val)",
    )
    other = """another data set with the same classes: a name as for `train`, or your own as
    package.module:function"""
    add("--data", metavar="NAME", help=other)
    add("--json", action="store_true", help="print one JSON object, with every digit")

    about = """Print the most probable classes of images.

    A line for each image, with tabs: path, most probable class, its probability, the next, ..."""
    predict = _add(commands, "runs.predict", about)
    paths = f"{_TARGET}; then images and folders of them"
    predict.add_argument("paths", nargs="*", type=Path, metavar="PATH", help=paths)
    top = "classes to print for each image (5)"
    predict.add_argument("--top", type=from_one, default=5, metavar="N", help=top)

    about = """Check that each sample counted exactly once in each finished epoch.

    With --sample-weights: as drawn. Exit code 1 if one did not."""
    audit = _add(commands, "runs.audit", about)
    run = f"{_RUN}; it was trained with --ledger"
    audit.add_argument("run", nargs="?", type=Path, metavar="RUN", help=run)

    about = """Train steps of a run again, compare them, and name the samples of large gradients.

    It starts from the last commit before them, on the launched ranks or this process alone, and
    writes nothing into the run. A sample's gradient is the one through its own outputs; batch norm
    lets samples act on others.
    Exit code 1 if loss or norm differ from the ledger (--ledger) by more than the tolerance."""
    replay = _add(commands, "runs.replay", about)
    add = replay.add_argument
    add("run", nargs="?", type=Path, metavar="RUN", help=_RUN)
    add("--steps", required=True, metavar="STEPS", help="330, or 330:345 (both included)")
    add("--top", type=from_zero, default=3, metavar="N", help="samples to name for each step (3)")
    saved = "write the tensors of the last step, for torch.load"
    add("--save-batch", type=Path, metavar="FILE", help=saved)
    gap = "how far loss and norm may differ, relative to their size, or to 1 (1e-4)"
    add("--tolerance", type=float, default=1e-4, metavar="X", help=gap)

    about = """Say at which step and in which tensors two runs part, and what differs.

    By the answers in their ledgers (--ledger), and commits of the same step. Exit code 0 if they
    are the same, else 1."""
    diff = _add(commands, "runs.diff", about)
    diff.add_argument("one", type=Path, metavar="A", help="run folder")
    diff.add_argument("other", type=Path, metavar="B", help="the run folder to compare it with")

    about = """Write the best weights as weights.pt, model.pt2 (torch.export) and model.json."""
    export = _add(commands, "runs.export", about)
    export.add_argument("target", nargs="?", type=Path, metavar="RUN", help=_TARGET)
    folder = "folder for the files; default: RUN/export, or CHECKPOINT.export"
    export.add_argument("--output", type=Path, metavar="FOLDER", help=folder)

    device = "the device of the model"
    for parser in (evaluate, predict):
        parser.add_argument(
            "--device", choices=("auto", "cpu", "cuda"), default="auto", help=device
        )
    for parser in (evaluate, predict, replay, export):
        parser.add_argument("--trust", action="store_true", help=_TRUST)

    about = """Show a running or finished training, read from its files.

    This ends when the run has ended."""
    watch = _add(commands, "runs.watch", about)
    watch.add_argument("run", nargs="?", type=Path, metavar="RUN", help=_RUN)
    once = "print the state now and end; this is the default without a terminal"
    watch.add_argument("--once", action="store_true", help=once)

    about = """Say why a running training does not go on: which rank is where.

    It asks all hosts of the run, over ssh or srun, and names the rank that the others wait for."""
    why = _add(commands, "runs.why", about)
    alive = "run folder; default: the newest run that trains on this host, or ranks that start"
    why.add_argument("run", nargs="?", type=Path, metavar="RUN", help=alive)

    about = """Write one HTML page about one run or many.

    It is complete in itself: what the runs reached, and how they differ."""
    report = _add(commands, "runs.report", about)
    folders = "run folders, and folders of `sweep` and `bench scaling`; default: the newest run"
    report.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=folders)
    page = """file of the page (report.html); an earlier report of this name is replaced, no other
    file is"""
    report.add_argument("--output", type=Path, default="report.html", metavar="FILE", help=page)


def _add_others(commands: Any) -> None:
    prove = _add(commands, "prove.prove", _PROVE, usage="%(prog)s [FLAGS] python FILE.py ...")
    prove.add_argument(
        "--np", type=from_one, default=3, metavar="N", help="ranks, on this machine (3)"
    )
    tolerance = """how far a number may differ with another number of ranks, relative to the largest
    of its tensor, or to 1 (1e-5; with --reduction exact 0)"""
    prove.add_argument("--tolerance", type=float, metavar="X", help=tolerance)
    prove.add_argument("command", nargs=REMAINDER, help="the script and its arguments")

    about = """Examine what this machine, or a cluster, and this build of Horovod can do.

    It runs a real allreduce over two ranks."""
    doctor = _add(commands, "machines.doctor", about)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    named = f"the hosts to examine, from the first, over ssh: {_HOSTS}, or node[01-04]:8"
    doctor.add_argument("--hosts", "-H", metavar="FILE", help=named)

    about = """Sort the validation images of ImageNet (ILSVRC2012) into class folders.

    Nothing moves before all images are found. If it is killed, the same command finishes."""
    valprep = _add(commands, "valprep.valprep", about)
    images = "the folder with ILSVRC2012_val_00000001.JPEG and so on: val/ of the data folder"
    valprep.add_argument("folder", type=Path, metavar="FOLDER", help=images)
    lists = """ILSVRC2012_devkit_t12, Kaggle's LOC_val_solution.csv, or a text of image names and
    classes; default: one of the first two next to FOLDER"""
    valprep.add_argument("--labels", type=Path, metavar="PATH", help=lists)

    about = """Write a data set as shards, for --data shards:OUT.

    Image files stay as they are, and samples in their order. If it is killed, the same command
    writes what is missing."""
    add = _add(commands, "shards.write_shards", about).add_argument
    source = "folder with train/ and val/, hf:FOLDER, or your own data as package.module:function"
    add("data", metavar="DATA", help=source)
    add("out", metavar="OUT", help="the folder to make")
    kinds = "wds: tar files of WebDataset; mds: as Streaming reads it (wds)"
    add("--format", choices=("wds", "mds"), default="wds", help=kinds)
    add("--shard-size", default="256MB", metavar="SIZE", help="the most bytes of a shard (256MB)")

    about = "Write a table next to tar files, so no host needs to read all their headers."
    index = _add(commands, "shards.index", about)
    where = "folder or URL of tar files, or of folders train and val"
    index.add_argument("url", metavar="URL", help=where)

    about = f"""Print a script for the TAB key.

    Type `source <({PROGRAM} completion bash)`, or zsh, here or in the shell's start-up file."""
    completion = _add(commands, "completion.completion", about)
    completion.add_argument("shell", nargs="?", metavar="{bash,zsh}", help="the shell")
