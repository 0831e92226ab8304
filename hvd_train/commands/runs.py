"""Commands about trainings that exist: `evaluate`, `predict`, `audit`, `export`, `watch` and `report`."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Literal

from hvd_train import plain_file
from hvd_train.console import PROGRAM, printable, say, show
from hvd_train.errors import UsageError, counted, first_few
from hvd_train.flags import parse_flags
from hvd_train.launch import launcher
from hvd_train.run_files import durable, run_folder
from hvd_train.run_files.journal import labelled


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a run's best weights, or a checkpoint: loss, top-1, top-5 and top-1 of each class."""

    target: Path | None = None
    """Run folder, checkpoint or model-best.pt of a run; default: the newest run."""
    data_dir: Path | None = None
    """Another folder of the data. Of class folders, the split is enough, or the folder holds the classes."""
    split: Literal["train", "val", "test"] = "val"
    """The part of the data to evaluate."""
    data: str | None = None
    """Another data set with the same classes: a name as for `train`, or your own as package.module:function."""
    json: bool = False
    """Print one JSON object, with every digit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the model."""
    trust: bool = False
    """Import the code that the run names as its model or data; it runs with your permissions."""


@dataclass(frozen=True)
class PredictOptions:
    """Print the most probable classes of image files, as in `hvd-train predict runs/NAME photo.jpg photos/`."""

    paths: tuple[Path, ...]
    """Run folder, checkpoint or model-best.pt of a run (default: the newest run); then image files and folders."""
    top: int = 5
    """Number of classes to print for each image."""
    output: Path | None = None
    """Write a CSV file of them, one line for each image, in place of printing them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the model."""
    trust: bool = False
    """Import the code that the run names as its model or data; it runs with your permissions."""


@dataclass(frozen=True)
class AuditOptions:
    """Check in ledger.jsonl that every sample counted exactly once in each finished epoch; exit code 1 if not."""

    run: Path | None = None
    """Run folder of a training with --ledger; default: the newest run."""


@dataclass(frozen=True)
class ExportOptions:
    """Write the best weights of a run or checkpoint as weights.pt, model.pt2 (torch.export) and model.json."""

    target: Path | None = None
    """Run folder, checkpoint or model-best.pt of a run; default: the newest run."""
    output: Path | None = None
    """Folder for the files; default: RUN/export, or CHECKPOINT.export."""
    trust: bool = False
    """Import the code that the run names as its model or data; it runs with your permissions."""


@dataclass(frozen=True)
class WatchOptions:
    """Show a running or finished training, read from its files; this ends when the run has ended."""

    run: Path | None = None
    """Run folder; default: the newest run."""
    once: bool = False
    """Print the state now and end; this is the default without a terminal."""


@dataclass(frozen=True)
class ReportOptions:
    """Write one HTML page, complete in itself, about one run or many: what they reached, and how they differ."""

    runs: tuple[Path, ...]
    """Run folders, and folders of `sweep` and `bench scaling`; default: the newest run."""
    output: Path = Path("report.html")
    """File of the page; an earlier report of this name is replaced, no other file is."""


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
    found, others = list[Path](), list[Path]()
    for path in paths:
        is_run = any((path / name).exists() for name in (run_folder.CONFIG, run_folder.METRICS))
        inside = [] if is_run else sorted(each.parent for each in path.glob(f"*/{run_folder.METRICS}"))
        (found if is_run or inside else others).extend(inside or [path])
    if found and others:
        say(f"left out, since they are no run folders: {first_few(others)}")
    return found or others


def evaluate(arguments: list[str]) -> int:
    """Evaluate on all ranks, print the scores on rank 0 and return 0. Raises UsageError for a wrong target."""
    options = parse_flags(EvaluateOptions, arguments, f"{PROGRAM} evaluate", "target")
    from hvd_train import run  # imports torch
    from hvd_train.world.world import together

    world, target = run.connect(), options.target
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
    """Print or write the classes of images, and return 0. Raises UsageError for wrong targets, images or output."""
    options = parse_flags(PredictOptions, arguments, f"{PROGRAM} predict", "paths")
    paths, output = options.paths, options.output
    named = [path for path in paths[:1] if path.suffix in (".pt", ".ckpt") or (path / run_folder.CONFIG).exists()]
    if len(paths) == len(named):
        raise UsageError(f"name images or folders of images: {PROGRAM} predict RUN photo.jpg photos/")
    if options.top < 1:
        raise UsageError(f"--top is {options.top}; it must be at least 1")
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}")
    from hvd_train.data.folder import images_in  # imports torch
    from hvd_train.run import predict

    files = images_in(paths[len(named) :])
    target = named[0] if named else _newest()
    rows = predict(target, files, top=options.top, device=options.device, trust=options.trust)
    if output is None:
        for file, found in zip(files, rows, strict=True):
            show(f"{printable(file)}  {'  '.join(f'{printable(name)} {share:.2%}' for name, share in found)}")
        return 0
    table = csv.writer(text := io.StringIO(newline=""))
    places = range(1, len(rows[0]) + 1)
    table.writerow(["image", *(f"{what}{place}" for place in places for what in ("class", "probability"))])
    table.writerows([file, *chain(*row)] for file, row in zip(files, rows, strict=True))
    durable.write_text(output, text.getvalue())
    show(f"{counted(len(files), 'image')}: {output}")
    return 0


def audit(arguments: list[str]) -> int:
    """Print the verdict; return 0 if every sample counted exactly once, else 1. Raises UsageError without a ledger."""
    options = parse_flags(AuditOptions, arguments, f"{PROGRAM} audit", "run")
    from hvd_train.run_files import ledger

    verdict = ledger.audit(options.run or _newest())
    show(verdict)
    return 1 if verdict.faults else 0


def export(arguments: list[str]) -> int:
    """Export the model, print the path of each file and return 0. Raises UsageError if that cannot be done."""
    options = parse_flags(ExportOptions, arguments, f"{PROGRAM} export", "target")
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
    options = parse_flags(WatchOptions, arguments, f"{PROGRAM} watch", "run")
    from hvd_train.report.watch import watch

    watch(options.run or _newest(), once=options.once or not sys.stdout.isatty(), interval_s=1.0)
    return 0


def report(arguments: list[str]) -> int:
    """Write the page, print its path and return 0. Raises UsageError if a folder or the output cannot be used."""
    options = parse_flags(ReportOptions, arguments, f"{PROGRAM} report", "runs")
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
