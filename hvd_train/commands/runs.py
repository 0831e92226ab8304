"""Commands about trainings that exist: `evaluate`, `predict`, `audit`, `export`, `watch` and `report`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hvd_train import plain_file
from hvd_train.console import PROGRAM, printable, say, show
from hvd_train.errors import Parser, UsageError, first_few, from_one
from hvd_train.launch import launcher
from hvd_train.run_files import durable, run_folder
from hvd_train.run_files.journal import labelled

_TARGET = "run folder, checkpoint or model-best.pt of a run; default: the newest run"
_RUN = "run folder; default: the newest run"
_TRUSTS = "use the code, hf: data and downloads that the run names; code runs with your permissions"
_TRUST: dict[str, Any] = {"action": "store_true", "help": _TRUSTS}
_DEVICE: dict[str, Any] = {"choices": ("auto", "cpu", "cuda"), "default": "auto", "help": "the device of the model"}


def _newest() -> Path:
    """Return the run folder in runs/ that was written last. Raises UsageError if there is none."""
    found = list(run_folder.RUNS.glob(f"*/{run_folder.METRICS}"))
    if not found:
        raise UsageError(f"which run? there is none in {run_folder.RUNS}/: name a run folder")
    newest = max(found, key=lambda path: path.stat().st_mtime).parent
    if launcher.speaks(os.environ):
        say(f"the newest run: {newest}")
    return newest


def _runs_in(paths: Sequence[Path]) -> Sequence[Path]:
    """Return these run folders, and the runs of a sweep for its folder; without other folders, if there are runs."""
    found = list[Path]()
    others = list[Path]()
    for path in paths:
        is_run = any((path / name).exists() for name in (run_folder.CONFIG, run_folder.METRICS))
        inside = [] if is_run else sorted(each.parent for each in path.glob(f"*/{run_folder.METRICS}"))
        (found if is_run or inside else others).extend(inside or [path])
    if found and others:
        say(f"left out, since they are no run folders: {first_few(others)}")
    return found or others


def evaluate(arguments: list[str]) -> int:
    """Evaluate on all ranks, print the scores on rank 0 and return 0. Raises UsageError for a wrong target."""
    about = "Score a run's best weights, or a checkpoint: loss, top-1, top-5 and top-1 of each class."
    parser = Parser(prog=f"{PROGRAM} evaluate", description=about)
    parser.add_argument("target", nargs="?", type=Path, metavar="RUN", help=_TARGET)
    folder = "another folder of the data; of class folders, the split is enough, or the folder holds the classes"
    parser.add_argument("--data-dir", type=Path, metavar="FOLDER", help=folder)
    parser.add_argument("--split", choices=("train", "val", "test"), default="val", help="the part of the data (val)")
    other = "another data set with the same classes: a name as for `train`, or your own as package.module:function"
    parser.add_argument("--data", metavar="NAME", help=other)
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every digit")
    parser.add_argument("--device", **_DEVICE)
    parser.add_argument("--trust", **_TRUST)
    options = parser.read(arguments)
    from hvd_train import run  # imports torch
    from hvd_train.world.world import together

    world = run.connect()
    target = options.target
    if target is None:  # hosts may have runs of their own
        newest = together(world, lambda: _newest() if world.place.rank == 0 else Path())
        target = world.broadcast(newest, 0)
    settings = {name: value for name, value in vars(options).items() if name not in ("target", "json")}
    scores = run.evaluate(target, world=world, **settings)
    if world.place.rank == 0 and options.json:
        print(json.dumps(scores.as_dict()))
    elif world.place.rank == 0:
        if scores.weights:
            print(scores.weights)
        figures = (labelled(name, value) for name, value in scores.items())
        print(f"{'  '.join(figures)}  ({scores.count:,} samples)")
        for name, share in scores.per_class.items():
            print(f"  {printable(name):<20} {share:8.2%}")
    return 0


def predict(arguments: list[str]) -> int:
    """Print the classes of images, and return 0. Raises UsageError for wrong targets or images."""
    about = "Print a line for each image, with tabs: path, most probable class, its probability, the next class, ..."
    parser = Parser(prog=f"{PROGRAM} predict", description=about)
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help=f"{_TARGET}; then images and folders of them"
    )
    parser.add_argument("--top", type=from_one, default=5, metavar="N", help="classes to print for each image (5)")
    parser.add_argument("--device", **_DEVICE)
    parser.add_argument("--trust", **_TRUST)
    options = parser.read(arguments)
    paths = options.paths
    named = [path for path in paths[:1] if path.suffix in (".pt", ".ckpt") or (path / run_folder.CONFIG).exists()]
    if len(paths) == len(named):
        raise UsageError(f"name images or folders of images: {PROGRAM} predict RUN photo.jpg photos/")
    from hvd_train.data.folder import images_in  # imports torch
    from hvd_train.run import predict

    files = images_in(paths[len(named) :])
    target = named[0] if named else _newest()
    rows = predict(target, files, top=options.top, device=options.device, trust=options.trust)
    for file, found in zip(files, rows, strict=True):
        show("\t".join(map(printable, [file, *(word for name, share in found for word in (name, f"{share:.6g}"))])))
    return 0


def audit(arguments: list[str]) -> int:
    """Print the verdict; return 0 if every sample counted exactly once, else 1. Raises UsageError without a ledger."""
    about = "Check in ledger.jsonl that every sample counted exactly once in each finished epoch; exit code 1 if not."
    parser = Parser(prog=f"{PROGRAM} audit", description=about)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=f"{_RUN}; it was trained with --ledger")
    options = parser.read(arguments)
    from hvd_train.run_files import ledger

    verdict = ledger.audit(options.run or _newest())
    show(verdict)
    return 1 if verdict.faults else 0


def export(arguments: list[str]) -> int:
    """Export the model, print the path of each file and return 0. Raises UsageError if that cannot be done."""
    about = "Write the best weights of a run or checkpoint as weights.pt, model.pt2 (torch.export) and model.json."
    parser = Parser(prog=f"{PROGRAM} export", description=about)
    parser.add_argument("target", nargs="?", type=Path, metavar="RUN", help=_TARGET)
    folder = "folder for the files; default: RUN/export, or CHECKPOINT.export"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=folder)
    parser.add_argument("--trust", **_TRUST)
    options = parser.read(arguments)
    from hvd_train.export import export  # imports torch

    target = options.target or _newest()
    usual = target / "export" if target.is_dir() else target.with_name(f"{target.name}.export")
    if options.output is None and usual.is_symlink():  # the author of the run may have planted it
        raise UsageError(f"{usual} is a link, which is not followed: name a folder with --output")
    for path in export(target, options.output or usual, trust=options.trust):
        show(path)
    return 0


def watch(arguments: list[str]) -> int:
    """Show the run until it ends, or once, and return 0. Raises UsageError if there is no run to show."""
    about = "Show a running or finished training, read from its files; this ends when the run has ended."
    parser = Parser(prog=f"{PROGRAM} watch", description=about)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=_RUN)
    once = "print the state now and end; this is the default without a terminal"
    parser.add_argument("--once", action="store_true", help=once)
    options = parser.read(arguments)
    from hvd_train.report.watch import watch

    watch(options.run or _newest(), once=options.once or not sys.stdout.isatty(), interval_s=1.0)
    return 0


def report(arguments: list[str]) -> int:
    """Write the page, print its path and return 0. Raises UsageError if a folder or the output cannot be used."""
    about = "Write one HTML page, complete in itself, about one run or many: what they reached, and how they differ."
    parser = Parser(prog=f"{PROGRAM} report", description=about)
    folders = "run folders, and folders of `sweep` and `bench scaling`; default: the newest run"
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=folders)
    page = "file of the page (report.html); an earlier report of this name is replaced, no other file is"
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help=page)
    options = parser.read(arguments)
    runs = _runs_in(options.runs) or [_newest()]
    from hvd_train.report.report import compose  # imports matplotlib

    try:
        with suppress(FileNotFoundError), plain_file.opened(options.output) as file:
            if b'content="hvd-train report"' not in file.read(1000):
                raise UsageError(f"--output {options.output} is no report of hvd-train; name another file or delete it")
        durable.write_text(options.output, compose(runs, datetime.now()))
    except OSError as error:
        raise UsageError(f"--output {options.output}: {error.strerror}") from None
    show(f"report: {options.output}")
    return 0
