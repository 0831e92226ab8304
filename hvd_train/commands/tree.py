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


def _number(parser: Any, names: str, about: str, default: int | None = None) -> None:
    parser.add_argument(*names.split(), type=from_one, default=default, metavar="N", help=about)


def _switch(parser: Any, name: str, about: str) -> None:
    parser.add_argument(name, action="store_true", help=about)


def _text(parser: Any, names: str, kind: str, about: str, default: str | None = None) -> None:
    parser.add_argument(*names.split(), default=default, metavar=kind, help=about)


def _texts(parser: Any, name: str, kind: str, about: str) -> None:
    parser.add_argument(name, action="append", default=[], metavar=kind, help=about)


def _choice(parser: Any, name: str, choices: tuple[str, ...], default: str, about: str) -> None:
    parser.add_argument(name, choices=choices, default=default, help=about)


def _path(parser: Any, name: str, kind: str, about: str, default: str | None = None) -> None:
    parser.add_argument(name, type=Path, default=default, metavar=kind, help=about)


def _run(parser: Any, name: str, about: str) -> None:
    parser.add_argument(name, nargs="?", type=Path, metavar="RUN", help=about)


def _settings(recipe: str) -> dict[str, Any]:
    """Return the options of a parser that takes a recipe and the flags of a training."""
    parser = Parser(add_help=False)
    words = "the recipe to start from, then the folder of its data, if it reads one"
    parser.add_argument("words", nargs="*", metavar="RECIPE", help=words)
    _path(parser, "--config", "FILE", "read all settings from a config.yaml")
    tries = "try the recipe for a minute: three steps on random images"
    parser.add_argument("--try", dest="tries", action="store_true", help=tries)
    add_settings(parser, recipes.RECIPES[recipe]())
    usage = "%(prog)s [RECIPE] [DATA_DIR] [FLAGS]"
    return {"parents": [parser], "usage": usage, "elsewhere": ELSEWHERE}


def _add_trainings(commands: Any, settings: dict[str, Any]) -> None:
    raw = RawDescriptionHelpFormatter
    train = _add(commands, "train.train", _TRAIN, formatter_class=raw, **settings)
    _number(train, "--np -np", "start N ranks here")
    _text(train, "--hosts -H", "FILE", f"start ranks on all slots of {_HOSTS}")

    about = "Check the settings of a training and print them, for --config FILE."
    _switch(_add(commands, "train.config", about, **settings), "--trust", _TRUST)

    about = """Train each combination of values, as in --lr 0.1,0.05.

    They run one after the other. A table lists the best first; exit code 1 if one failed."""
    sweep = _add(commands, "sweep.sweep", about, **settings)
    _number(sweep, "--np -np", "ranks of each training (one process)")
    _text(sweep, "--hosts -H", "FILE", f"start them on {_HOSTS}")


def _add_bench(commands: Any, settings: dict[str, Any]) -> None:
    about = "Measure the step, or trainings on more workers."
    tools = commands.add_parser("bench", help=about, description=about).add_commands()
    about = f"""Measure images/s of the real step, and where its time goes.

    On random images, or on --data. On two ranks: horovodrun -np 2 {PROGRAM} bench throughput"""
    throughput = _add(tools, "bench.throughput", about, **settings)
    _number(throughput, "--steps", "steps of a repetition (20)", 20)
    _number(throughput, "--repetitions", "how often to time the steps (5)", 5)

    about = "Train on each number of workers, which this starts; make a table."
    scaling = _add(tools, "bench.scaling", about, **settings)
    _text(scaling, "--np", "N,N,...", "numbers of workers, as in --np 1,2,4", "")
    _text(scaling, "--hosts", "FILE", f"the hosts of the ranks: {_HOSTS}")
    mode = "weak: the batch grows with the workers; strong: the global batch stays (weak)"
    _choice(scaling, "--mode", ("weak", "strong"), "weak", mode)
    _choice(scaling, "--controller", ("gloo", "mpi"), "gloo", "of horovodrun (gloo)")
    for tool in (throughput, scaling):
        _path(tool, "--json", "FILE", "write the record into a file")


def _add_launch(commands: Any) -> None:
    raw = RawDescriptionHelpFormatter
    usage = "%(prog)s [FLAGS] [-- COMMAND]"
    parser = _add(commands, "launch.launch", _LAUNCH, usage=usage, formatter_class=raw)
    _number(parser, "-n -np --np", "ranks (default: all slots; here one per GPU, or 2)")
    _text(parser, "-H --hosts", "FILE", _HOSTS)
    ways = parser.add_mutually_exclusive_group()
    way = """gloo, mpi: horovodrun; mpirun (MPIRUN_FLAGS adds flags); slurm: srun, a rank for each
    task; docker: a container on each host; apptainer: ranks in an image on this machine"""
    ways.add_argument("--with", dest="way", choices=_WAYS, default="gloo", help=way)
    for name in ("gloo", "mpi"):
        ways.add_argument(
            f"--{name}", dest="way", action="store_const", const=name, help=f"--with {name}"
        )
    _texts(parser, "--env", "NAME", "a variable that ranks on other hosts get, too")
    _switch(parser, "--dry-run", "print the commands; run nothing")
    _switch(parser, "--elastic", "workers may die, leave and join; edit FILE while the job runs")
    elastic = parser.add_argument_group("elastic jobs")
    _number(elastic, "--min-np", "with fewer workers the others wait", 1)
    _number(elastic, "--max-np", "the most workers (default: all slots)")
    _text(elastic, "--discover", "COMMAND", "a command that prints the lines of a host file")
    boxes = parser.add_argument_group("containers")
    _text(boxes, "--image", "IMAGE", "the image (hvd_train, or hvd_train.sif for Apptainer)")
    _texts(boxes, "--volume", "FROM:TO", "a folder of each host")
    _text(boxes, "--runs", "DIR", "the folder of each host for runs", "runs")
    _number(boxes, "--port", "of the ssh servers inside", 2222)
    batch = parser.add_argument_group("Slurm")
    _switch(batch, "--requeue", "in a batch job: if stopped, go back into the queue")
    parser.add_argument("command", nargs=REMAINDER, help=SUPPRESS)


def _add_runs(commands: Any) -> None:
    about = """Score a run's best weights, or a checkpoint.

    By loss, top-1, top-5 and top-1 of each class, or the figures of its task."""
    evaluate = _add(commands, "runs.evaluate", about)
    _run(evaluate, "target", _TARGET)
    folder = """another folder of the data; of class folders, the split is enough, or the folder
    holds the classes"""
    _path(evaluate, "--data-dir", "FOLDER", folder)
    _choice(evaluate, "--split", ("train", "val", "test"), "val", "the part of the data (val)")
    other = """another data set with the same classes: a name as for `train`, or your own as
    package.module:function"""
    _text(evaluate, "--data", "NAME", other)
    _switch(evaluate, "--json", "print one JSON object, with every digit")

    about = """Print the most probable classes of images.

    A line for each image, with tabs: path, most probable class, its probability, the next, ..."""
    predict = _add(commands, "runs.predict", about)
    paths = f"{_TARGET}; then images and folders of them"
    predict.add_argument("paths", nargs="*", type=Path, metavar="PATH", help=paths)
    _number(predict, "--top", "classes to print for each image (5)", 5)

    about = """Check that each sample counted exactly once in each finished epoch.

    With --sample-weights: as drawn. Exit code 1 if one did not."""
    _run(_add(commands, "runs.audit", about), "run", f"{_RUN}; it was trained with --ledger")

    about = """Train steps of a run again, compare them, and name the samples of large gradients.

    It starts from the last commit before them, on the launched ranks or this process alone, and
    writes nothing into the run. A sample's gradient is the one through its own outputs; batch norm
    lets samples act on others.
    Exit code 1 if loss or norm differ from the ledger (--ledger) by more than the tolerance."""
    replay = _add(commands, "runs.replay", about)
    _run(replay, "run", _RUN)
    steps = "330, or 330:345 (both included)"
    replay.add_argument("--steps", required=True, metavar="STEPS", help=steps)
    top = "samples to name for each step (3)"
    replay.add_argument("--top", type=from_zero, default=3, metavar="N", help=top)
    _path(replay, "--save-batch", "FILE", "write the tensors of the last step, for torch.load")
    gap = "how far loss and norm may differ, relative to their size, or to 1 (1e-4)"
    replay.add_argument("--tolerance", type=float, default=1e-4, metavar="X", help=gap)

    about = """Say at which step and in which tensors two runs part, and what differs.

    By the answers in their ledgers (--ledger), and states and commits of the same step. Exit code 0
    if they are the same, else 1."""
    diff = _add(commands, "runs.diff", about)
    _path(diff, "one", "A", "run folder")
    _path(diff, "other", "B", "the run folder to compare it with")

    about = """Write the best weights as weights.pt, model.pt2 (torch.export) and model.json."""
    export = _add(commands, "runs.export", about)
    _run(export, "target", _TARGET)
    folder = "folder for the files; default: RUN/export, or CHECKPOINT.export"
    _path(export, "--output", "FOLDER", folder)

    for parser in (evaluate, predict):
        _choice(parser, "--device", ("auto", "cpu", "cuda"), "auto", "the device of the model")
    for parser in (evaluate, predict, replay, export):
        _switch(parser, "--trust", _TRUST)

    about = """Show a running or finished training, read from its files.

    This ends when the run has ended."""
    watch = _add(commands, "runs.watch", about)
    _run(watch, "run", _RUN)
    _switch(watch, "--once", "print the state now and end; this is the default without a terminal")

    about = """Say why a running training does not go on: which rank is where.

    It asks all hosts of the run, over ssh or srun, and names the rank that the others wait for."""
    alive = "run folder; default: the newest run that trains on this host, or ranks that start"
    _run(_add(commands, "runs.why", about), "run", alive)

    about = """Write one HTML page about one run or many.

    It is complete in itself: what the runs reached, and how they differ."""
    report = _add(commands, "runs.report", about)
    folders = "run folders, and folders of `sweep` and `bench scaling`; default: the newest run"
    report.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=folders)
    page = """file of the page (report.html); an earlier report of this name is replaced, no other
    file is"""
    _path(report, "--output", "FILE", page, "report.html")


def _add_others(commands: Any) -> None:
    prove = _add(commands, "prove.prove", _PROVE, usage="%(prog)s [FLAGS] python FILE.py ...")
    _number(prove, "--np", "ranks, on this machine (3)", 3)
    tolerance = """how far a number may differ with another number of ranks, relative to the largest
    of its tensor, or to 1 (1e-5; with --reduction exact 0)"""
    prove.add_argument("--tolerance", type=float, metavar="X", help=tolerance)
    prove.add_argument("command", nargs=REMAINDER, help="the script and its arguments")

    about = """Examine what this machine, or a cluster, and this build of Horovod can do.

    It runs a real allreduce over two ranks."""
    doctor = _add(commands, "machines.doctor", about)
    _switch(doctor, "--json", "print one JSON object")
    named = f"the hosts to examine, from the first, over ssh: {_HOSTS}, or node[01-04]:8"
    _text(doctor, "--hosts -H", "FILE", named)

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
    shards = _add(commands, "shards.write_shards", about)
    source = "folder with train/ and val/, hf:FOLDER, or your own data as package.module:function"
    _text(shards, "data", "DATA", source)
    _text(shards, "out", "OUT", "the folder to make")
    kinds = "wds: tar files of WebDataset; mds: as Streaming reads it (wds)"
    _choice(shards, "--format", ("wds", "mds"), "wds", kinds)
    _text(shards, "--shard-size", "SIZE", "the most bytes of a shard (256MB)", "256MB")

    about = "Write a table next to tar files, so no host needs to read all their headers."
    index = _add(commands, "shards.index", about)
    _text(index, "url", "URL", "folder or URL of tar files, or of folders train and val")

    about = f"""Print a script for the TAB key.

    Type `source <({PROGRAM} completion bash)`, or zsh, here or in the shell's start-up file."""
    completion = _add(commands, "completion.completion", about)
    completion.add_argument("shell", nargs="?", metavar="{bash,zsh}", help="the shell")
