"""Commands about trainings that exist: `evaluate`, `predict`, `audit`, `replay`, `diff`,
`export`, `watch`, `why` and `report`.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_train import plain_file
from hvd_train.config import steps_in
from hvd_train.console import PROGRAM, printable, say, show
from hvd_train.errors import UsageError, first_few
from hvd_train.launch import containers, launcher, stacks, workers
from hvd_train.launch.why import explain, explain_start
from hvd_train.run_files import durable, run_folder
from hvd_train.run_files.journal import labelled

if TYPE_CHECKING:
    from hvd_train.replay import ReplayedStep
    from hvd_train.world.world import World


def _newest() -> Path:
    """Return the run folder in runs/ that was written last. Raises UsageError if there is none."""
    found = list(run_folder.RUNS.glob(f"*/{run_folder.METRICS}"))
    if not found:
        raise UsageError(f"which run? there is none in {run_folder.RUNS}/: name a run folder")
    newest = max(found, key=lambda path: path.stat().st_mtime).parent
    if launcher.prints():
        say(f"the newest run: {newest}")
    return newest


def _runs_in(paths: Sequence[Path]) -> Sequence[Path]:
    """Return these run folders, and the runs of a sweep for its folder; without other
    folders, if there are runs.
    """
    found = list[Path]()
    others = list[Path]()
    for path in paths:
        is_run = any((path / name).exists() for name in (run_folder.CONFIG, run_folder.METRICS))
        inside = (
            [] if is_run else sorted(each.parent for each in path.glob(f"*/{run_folder.METRICS}"))
        )
        (found if is_run or inside else others).extend(inside or [path])
    if found and others:
        say(f"left out, since they are no run folders: {first_few(others)}")
    return found or others


def _newest_on_rank_0(world: World) -> Path:
    """Return rank 0's newest run on all ranks: hosts may have runs of their own."""
    from hvd_train.world.world import together

    newest = together(world, lambda: _newest() if world.place.rank == 0 else Path())
    return world.broadcast(newest, 0)


def evaluate(options: Namespace) -> int:
    """Evaluate on all ranks, print the scores on rank 0 and return 0.

    Raises UsageError for a wrong target.
    """
    from hvd_train import run  # imports torch

    world = run.connect()
    target = options.target or _newest_on_rank_0(world)
    names = ("data_dir", "split", "data", "device", "trust")
    settings = {name: getattr(options, name) for name in names}
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


def predict(options: Namespace) -> int:
    """Print the classes of images, and return 0. Raises UsageError for wrong targets or images."""
    paths = options.paths
    named = [
        path
        for path in paths[:1]
        if path.suffix in (".pt", ".ckpt") or (path / run_folder.CONFIG).exists()
    ]
    if len(paths) == len(named):
        raise UsageError(
            f"name images or folders of images: {PROGRAM} predict RUN photo.jpg photos/"
        )
    from hvd_train.data.folder import images_in  # imports torch
    from hvd_train.run import predict

    files = images_in(paths[len(named) :])
    target = named[0] if named else _newest()
    rows = predict(target, files, top=options.top, device=options.device, trust=options.trust)
    for file, found in zip(files, rows, strict=True):
        show(
            "\t".join(
                map(
                    printable,
                    [file, *(word for name, share in found for word in (name, f"{share:.6g}"))],
                )
            )
        )
    return 0


def audit(options: Namespace) -> int:
    """Print the verdict and the commits; return 0 if every sample counted once, or as drawn.

    Otherwise return 1. Raises UsageError without a ledger.
    """
    from hvd_train.run_files import commits, ledger

    run = options.run or _newest()
    verdict = ledger.audit(run)
    show(verdict)
    show(commits.described(run))
    return 1 if verdict.faults else 0


def replay(options: Namespace) -> int:
    """Print steps that are trained again, with their largest samples.

    Return 1 if one differs from the ledger by more than the tolerance. Raises UsageError.
    """
    steps = steps_in("--steps", options.steps)
    if workers.elastic(os.environ):
        raise UsageError("a replay has a fixed number of ranks: leave out --elastic")
    from hvd_train import replay  # imports torch
    from hvd_train.run import connected

    compared = 0
    differing = 0
    with connected() as world:
        run = options.run or _newest_on_rank_0(world)
        found = replay.replay(
            run,
            steps,
            world=world,
            trust=options.trust,
            top=options.top,
            save_to=options.save_batch,
        )
        for step in found:
            compared += step.recorded is not None
            differing += step.gap > options.tolerance
            if world.place.rank == 0:
                _show_step(step)
        if world.place.rank > 0:  # a launcher would end the rank that prints
            return 0
    if not compared:
        show(f"{run} has no answers of these steps in its ledger: train with --ledger")
    elif differing:
        show(f"{differing} of {compared} steps differ by more than {options.tolerance:g}")
    return 1 if differing else 0


def _show_step(step: ReplayedStep) -> None:
    answer = step.answer
    show(
        f"step {step.number}  loss {answer.loss:.6g}  gradient norm "
        f"{answer.gradient_norm:.6g}  {step.verdict}"
    )
    for sample in step.samples:
        share = "   not finite" if math.isnan(sample.share) else f"{sample.share:8.1%}"
        norm = f"gradient norm {sample.gradient_norm:.4g}"
        show(printable(f"{share}  sample {sample.number}  {norm}  {sample.file}".rstrip()))


def diff(options: Namespace) -> int:
    """Print where two runs part, and what differs between them; return 0 if they are the same.

    Otherwise return 1. Raises UsageError if nothing can be compared.
    """
    from hvd_train.comparison import difference  # imports torch

    is_same, lines = difference(options.one, options.other)
    for line in lines:
        show(printable(line))
    return 0 if is_same else 1


def export(options: Namespace) -> int:
    """Export the model, print the path of each file and return 0.

    Raises UsageError if that cannot be done.
    """
    from hvd_train.export import export  # imports torch

    target = options.target or _newest()
    usual = target / "export" if target.is_dir() else target.with_name(f"{target.name}.export")
    if options.output is None and usual.is_symlink():  # the author of the run may have planted it
        raise UsageError(f"{usual} is a link, which is not followed: name a folder with --output")
    for path in export(target, options.output or usual, trust=options.trust):
        show(path)
    return 0


def watch(options: Namespace) -> int:
    """Show the run until it ends, or once, and return 0.

    Raises UsageError if there is no run to show.
    """
    from hvd_train.report.watch import watch

    watch(options.run or _newest(), once=options.once or not sys.stdout.isatty(), interval_s=1.0)
    return 0


def why(options: Namespace) -> int:
    """Print which rank the others wait for, and where it is; return 0.

    Raises UsageError if no rank of the run is alive.
    """
    for line in _reasons(options.run):
        show(printable(line))
    return 0


def _reasons(given: Path | None) -> list[str]:
    """Return which rank the others wait for in a run, or in the newest one of this host.

    Raises UsageError if no rank of it is alive.
    """
    run = given or _newest_here()
    if run is None and (numbers := stacks.ranks_that_start()):
        host = socket.gethostname()
        # they have not met, so no file says where the others are
        return explain_start(numbers, host, stacks.ask(host, [*numbers], run_folder.RUNS))
    if run is None:
        nothing = f"which run? none in {run_folder.RUNS}/ trains on this host: name a run folder"
        return containers.why(None, nothing)
    members, job = _members(run)
    found = stacks.ask_all(members, run.absolute(), job)
    unknown = [of_host for of_host in found.values() if isinstance(of_host, str)]
    if not any(of_host["ranks"] for of_host in found.values() if not isinstance(of_host, str)):
        nothing = f"{run}: none of its ranks is alive; it has ended, or not begun"
        try:
            return containers.why(run, nothing)
        except UsageError:
            if not unknown:
                raise
    return explain(members, found)


def _members(run: Path) -> tuple[list[tuple[str, int]], str]:
    """Return host and process of each rank of the last world of a run, and its job of Slurm.

    Raises UsageError.
    """
    if not run.is_dir():
        raise UsageError(f"{run}: no such run folder")
    try:
        members = json.loads(plain_file.read_text(run / run_folder.RANKS))
        places = [(str(member["host"]), int(member["process"])) for member in members]
        return places, str(members[0].get("job", ""))
    except OSError as error:
        raise UsageError(
            f"{run / run_folder.RANKS}: {error.strerror}; a run writes it when it begins to train: "
            f"before, type `{PROGRAM} why`"
        ) from None
    except (ValueError, TypeError, LookupError, AttributeError):
        raise UsageError(f"{run / run_folder.RANKS} is not a file of hvd_train") from None


def _newest_here() -> Path | None:
    """Return the newest run in runs/ with a rank on this host, if there is one."""
    files = [
        file for way in ("*", "*/*") for file in run_folder.RUNS.glob(f"{way}/{run_folder.RANKS}")
    ]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        with suppress(UsageError):  # a damaged file
            if any(
                stacks.is_here(host, [process]) and stacks.place_of(process)
                for host, process in _members(file.parent)[0]
            ):
                say(f"the newest run that trains here: {file.parent}")
                return file.parent
    return None


def report(options: Namespace) -> int:
    """Write the page, print its path and return 0.

    Raises UsageError if a folder or the output cannot be used.
    """
    runs = _runs_in(options.runs) or [_newest()]
    from hvd_train.report.report import compose  # imports matplotlib

    try:
        with suppress(FileNotFoundError), plain_file.opened(options.output) as file:
            if b'content="hvd-train report"' not in file.read(1000):
                raise UsageError(
                    f"--output {options.output} is no report of hvd-train; name "
                    "another file or delete it"
                )
        durable.write_text(options.output, compose(runs, datetime.now()))
    except OSError as error:
        raise UsageError(f"--output {options.output}: {error.strerror}") from None
    show(f"report: {options.output}")
    return 0
