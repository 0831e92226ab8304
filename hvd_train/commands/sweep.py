"""`hvd-train sweep`: split one MPI allocation into independent trainings, one for each combination of settings."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import textwrap
import time
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_train import console, plain_file
from hvd_train.bench import record
from hvd_train.commands.train import check_local, parse_train
from hvd_train.config import Config
from hvd_train.errors import HvdTrainError, UsageError
from hvd_train.flags import take
from hvd_train.launch import launcher, roll_call
from hvd_train.run_files import durable, history
from hvd_train.run_files.journal import labelled

if TYPE_CHECKING:
    from hvd_train.world.world import World

_WHOLE = "--log-to", "--optimizer-args"  # a value of these flags may have commas


def sweep(arguments: list[str]) -> int:
    """Train every combination of values; return 0 if each finished, else 1. Raises UsageError before any starts."""
    options, arguments = take(arguments, workers_per_run=1, output_dir=None)
    workers = options.workers_per_run
    name = f"sweep-{zlib.crc32(' '.join(arguments).encode()):08x}"
    folder = Path(options.output_dir or f"runs/{name}")  # one command, one folder
    from hvd_train.run import check  # imports torch
    from hvd_train.world.world import LocalWorld

    trainings = []
    for number, (name, words) in enumerate(combinations(arguments)):
        path = folder / f"{number:03}-{name.replace(' ', '-').replace('/', '_')}"
        trainings.append((name, parse_train(words, "sweep").replace(output_dir=path)))
        check_local(trainings[-1][1], "sweep")
        check(trainings[-1][1])
    if launcher.launched(os.environ) is not None:
        rows = _train_by_mpi(trainings, workers, folder)
    elif workers > 1:
        raise UsageError(f"--workers-per-run {workers} needs a launcher: type `mpirun -np {workers} hvd-train sweep`")
    else:
        rows = [_try(name, config, LocalWorld(), speaks=True) for name, config in trainings]
        _conclude(rows, folder)
    return 1 if any(row["failed"] for row in rows) else 0


def combinations(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return name and arguments of every combination of values with commas."""
    parts: list[list[tuple[str, str]]] = []
    flag = ""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument.startswith("-"):
            flag = argument.partition("=")[0].replace("_", "-")
        begin, equals, text = argument.rpartition("=")
        name = (begin or before).lstrip("-")
        values = [text] if flag in _WHOLE else re.split(r",(?![^\[]*\])", text)  # not the comma of layer[1,2].*
        parts.append([(f"{name}={one}" if values[1:] else "", f"{begin}{equals}{one}") for one in values])
    return [
        (" ".join(name for name, _ in chosen if name) or "only", [word for _, word in chosen])
        for chosen in itertools.product(*parts)
    ]


def _train_by_mpi(trainings: Sequence[tuple[str, Config]], workers: int, folder: Path) -> list[dict[str, Any]]:
    """Split the ranks into groups of `workers`, train one setting at a time on each and return all rows."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise UsageError("a sweep on several ranks needs mpi4py: pip install mpi4py") from None
    from hvd_train.world.horovod_world import HorovodWorld

    all_ranks = MPI.COMM_WORLD
    if all_ranks.size < workers:
        raise UsageError(f"--workers-per-run {workers}: MPI has started {all_ranks.size}; type mpirun -np {workers}")
    at_a_time = all_ranks.size // workers
    group = all_ranks.rank // workers
    on_host = all_ranks.Split_type(MPI.COMM_TYPE_SHARED)
    mine = all_ranks.Split(group if group < at_a_time else MPI.UNDEFINED, all_ranks.rank)
    rows = []
    speaks = mine != MPI.COMM_NULL and mine.rank == 0
    if mine != MPI.COMM_NULL:
        world = partial(HorovodWorld, communicator=mine, local=(on_host.rank, on_host.size))
        here = trainings[group::at_a_time]
        rows = [_try(name, config, world(), speaks=speaks) for name, config in here]
    roll_call.come_together(all_ranks)
    texts = roll_call.gathered(all_ranks, json.dumps(rows if speaks else []))
    rows = list(itertools.chain(*map(json.loads, texts)))
    if all_ranks.rank == 0:
        _conclude(rows, folder)
    roll_call.come_together(all_ranks)  # rank 0 has written a file
    return rows


def _try(name: str, config: Config, world: World, *, speaks: bool) -> dict[str, Any]:
    """Train with one setting and return its row, whole on the rank that `speaks`, which logs next to the run folder."""
    from hvd_train.run import train

    started = time.perf_counter()
    folder = config.run.output_dir
    assert folder is not None
    row: dict[str, Any] = {"name": name, "run": str(folder), "failed": None, "best": None, "higher": False}
    with contextlib.ExitStack() as stack:
        if speaks:
            folder.parent.mkdir(parents=True, exist_ok=True)
            path = folder.with_name(f"{folder.name}.log")
            log = stack.enter_context(open(path, "a", encoding="utf-8", buffering=1, opener=plain_file.in_place))
            stack.enter_context(contextlib.redirect_stdout(log))
        try:
            result = train(config, world=world)
            row["failed"] = None if result.finished else "stopped"
            if speaks:
                figure, higher = history.read(folder).goal
                row |= {"figure": figure, "higher": higher, "best": history.number(result.best, figure)}
        except Exception as error:  # noqa: BLE001  # a model may raise anything
            row["failed"] = str(error) if isinstance(error, HvdTrainError) else f"{type(error).__name__}: {error}"
    row["seconds"] = round(time.perf_counter() - started, 1)
    if speaks:
        console.show(f"{name}: {_outcome(row)} ({row['seconds']:.0f} s)")
    return row


def _conclude(rows: list[dict[str, Any]], folder: Path) -> None:
    """Show the best first and the failed last, and write all rows."""
    rows.sort(key=lambda row: row["best"] or 0.0, reverse=any(row["higher"] for row in rows))
    rows.sort(key=lambda row: (row["failed"] is not None, row["best"] is None))
    lines = [("training", "result", "seconds", "run")]
    for row in rows:
        lines.append((row["name"], textwrap.shorten(_outcome(row), 60), f"{row['seconds']:.0f}", row["run"]))
    console.show(record.table(lines))
    durable.write_text(folder / "sweep.json", json.dumps(rows, indent=1) + "\n")


def _outcome(row: dict[str, Any]) -> str:
    if row["failed"]:
        return f"failed: {row['failed']}"
    return "not evaluated" if row["best"] is None else labelled(row["figure"], row["best"])
