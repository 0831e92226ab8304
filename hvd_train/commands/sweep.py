"""`hvd-train sweep`: train each combination of settings, one after the other."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
import time
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

from hvd_train.bench import record, scaling
from hvd_train.commands import tree
from hvd_train.commands.train import SETTINGS, check_local, settings_of
from hvd_train.console import show
from hvd_train.launch import hosts, start
from hvd_train.run_files import durable, history
from hvd_train.run_files.journal import labelled

_WHOLE = ("log_to", "output_dir")  # a value of these settings may have commas
_COMMA = re.compile(r",(?![^\[]*\])")  # not that of layer[1,2].*


def sweep(options: Namespace) -> int:
    """Train every combination of values; return 0 if each finished, else 1.

    Raises: UsageError: before any starts; KeyboardInterrupt: after a signal, when the running one
    has ended.
    """
    listed = hosts.named(options.hosts or None)
    ranks = options.np or sum(host.slots for host in listed)
    arguments = tree.without(options.typed, ["--np", "-np"], ["--hosts", "-H"], ["--output-dir"])
    name = f"sweep-{zlib.crc32(' '.join(arguments).encode()):08x}"
    folder = Path(getattr(options, "output_dir", f"runs/{name}"))  # one command, one folder
    from hvd_train.run import check  # imports torch

    trainings = []
    for number, (name, chosen) in enumerate(combinations(options)):
        path = folder / f"{number:03}-{name.replace(' ', '-').replace('/', '_')}"
        chosen.output_dir = str(path)
        config = settings_of(chosen)
        check_local(config, options)
        check(config)
        trainings.append((name, config, path))
    begin = start.horovodrun(ranks, listed, "gloo") if ranks else []
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, config, path in trainings:
        started = time.perf_counter()
        failed = scaling.train(begin, config, path)
        row: dict[str, Any] = {"name": name, "run": str(path), "failed": failed, "best": None}
        row["seconds"] = round(time.perf_counter() - started, 1)
        if failed is None:
            found = history.read(path)
            row["figure"], row["higher"] = found.goal
            row["best"] = history.number(found.summary, f"best_{row['figure']}")
        rows.append(row)
        show(f"{name}: {_outcome(row)} ({row['seconds']:.0f} s)")
    _conclude(rows, folder)
    return 1 if any(row["failed"] for row in rows) else 0


def combinations(options: Namespace) -> list[tuple[str, Namespace]]:
    """Return name and options of every combination of values with commas."""
    values = {
        name: _COMMA.split(value)
        for name, value in vars(options).items()
        if name in SETTINGS and name not in _WHOLE and isinstance(value, str)
    }
    several = {name: each for name, each in values.items() if len(each) > 1}
    found = []
    for chosen in itertools.product(*several.values()):
        changed = dict(zip(several, chosen, strict=True))
        name = " ".join(f"{setting}={value}" for setting, value in changed.items())
        found.append((name or "only", Namespace(**{**vars(options), **changed})))
    return found


def _conclude(rows: list[dict[str, Any]], folder: Path) -> None:
    """Show the best first and the failed last, and write all rows."""
    rows.sort(key=lambda row: row["best"] or 0.0, reverse=any(row.get("higher") for row in rows))
    rows.sort(key=lambda row: (row["failed"] is not None, row["best"] is None))
    lines = [
        (row["name"], textwrap.shorten(_outcome(row), 60), f"{row['seconds']:.0f}", row["run"])
        for row in rows
    ]
    show(record.table([("training", "result", "seconds", "run"), *lines]))
    durable.write_text(folder / "sweep.json", json.dumps(rows, indent=1) + "\n")


def _outcome(row: dict[str, Any]) -> str:
    if row["failed"]:
        return f"failed: {row['failed']}"
    return "not evaluated" if row["best"] is None else labelled(row["figure"], row["best"])
