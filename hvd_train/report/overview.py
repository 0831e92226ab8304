"""Sections on runs as a whole: what they reached, how their settings differ, and where they ran."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from markupsafe import Markup

from hvd_train.config import Config
from hvd_train.progress.figures import Shown
from hvd_train.report import page
from hvd_train.run_files.history import History, whole
from hvd_train.run_files.metrics_file import better_epoch, number

_ENDINGS = {
    "broke off": "broke off (killed or failed)",
    "unknown": "ran on another machine; it has not reported its end",
}


def summary(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return what each run reached: cards for one run, a table for several; and what cannot be read of them."""
    facts = [_facts(run) for run in runs]
    several = len(runs) > 1
    gaps = page.gaps((name if several else "", gap) for run, name in zip(runs, names, strict=True) for gap in run.gaps)
    if not several:
        return page.cards(facts[0].items()) + gaps
    shared = Markup()
    if len(runs) > page.MANY:  # what is the same in each row is said once
        _, same = _compared(facts)
        shared = (
            page.paragraph(f"All runs: {', '.join(f'{fact} {value}' for fact, value in same)}.") if same else shared
        )
        facts = [{fact: value for fact, value in of_run.items() if [fact, value] not in same} for of_run in facts]
    rows = ([name, *of_run.values()] for name, of_run in zip(names, facts, strict=True))
    return shared + page.table(["run", *facts[0]], rows) + gaps


def configuration(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return the settings that differ among the runs, those that all share, and those that have their usual values."""
    settings = [
        {key: page.written(value) for key, value in run.settings.items() if key != "output_dir"} for run in runs
    ]
    if not any(settings):
        return page.gap("the run folders have no settings that can be read")
    usual = {key: page.written(value) for key, value in Config().settings().items()}
    differing, shared = _compared(settings)
    chosen = [row for row in shared if usual.get(row[0]) != row[1]]
    rest = [row for row in shared if row not in chosen]
    pieces = []
    if len(runs) > 1:
        pieces += [
            page.heading("What differs between the runs"),
            page.beside("setting", names, differing) if differing else page.paragraph("Nothing."),
            page.heading("What all runs share"),
        ]
    if chosen:
        pieces.append(page.table(["setting", "value"], chosen))
    pieces.append(page.details(f"{len(rest)} more, with their usual values", page.table(["setting", "value"], rest)))
    return Markup().join(pieces)


def environment(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return versions, hosts, device and command of the runs: first what differs, then what all share."""
    facts = [_flattened(run.environment) for run in runs]
    differing, shared = _compared(facts)
    pieces = [page.gaps((name, "not recorded") for name, of_run in zip(names, facts, strict=True) if not of_run)]
    if differing:
        pieces.append(page.beside("fact", names, differing))
    if shared:
        pieces.append(page.table(["fact of all runs" if len(runs) > 1 else "fact", "value"], shared))
    return Markup().join(pieces)


def best_score(run: History, figure: Shown) -> float:
    """Return a number that is higher the better a run's best evaluation by a figure is; least without one."""
    value = number(_best(run, figure), f"val_{figure.name}")
    if value is None:
        return -math.inf
    return value if figure.better == "higher" else -value


def _best(run: History, figure: Shown) -> Mapping[str, Any]:
    evaluated = [epoch for epoch in run.epochs if number(epoch, f"val_{figure.name}") is not None]
    return reduce(lambda one, other: better_epoch(one, other, figure), evaluated) if evaluated else {}


def _facts(run: History) -> dict[str, str]:
    figure, best = run.best, _best(run, run.best)
    last = next((epoch for epoch in reversed(run.epochs) if number(epoch, "val_loss") is not None), {})
    done = max((whole(epoch.get("epoch")) or 0 for epoch in run.epochs), default=0)
    steps = max((whole(record.get("step")) or 0 for record in (*run.steps, *run.epochs)), default=0)
    skipped = max((number(step, "skipped_steps") or 0 for step in run.steps), default=0)
    share = number(run.summary, "epoch_share") or 0.0
    times = [time for time in (number(epoch, "seconds") for epoch in run.epochs) if time is not None]
    sizes = [(kind, number(run.summary, f"peak_{name}")) for kind, name in (("", "memory"), ("GPU ", "gpu_memory"))]
    peaks = [f"{kind}{size / 1e9:.2f} GB" for kind, size in sizes if size is not None]
    speed = number(run.summary, "images_per_second") or next(
        (number(record, "images_per_second") for record in reversed((*run.steps, *run.epochs))), None
    )
    test = number(run.summary, f"test_{figure.name}")
    why = str(run.summary.get("why") or "")
    state = (
        f"finished: {why}"
        if run.state == "finished" and why not in ("", "done")
        else _ENDINGS.get(run.state, run.state)
    )
    return {
        "state": state,
        "model": page.written(run.settings.get("model")),
        "data": page.written(run.settings.get("data")),
        "workers": str(run.world_size or "?"),
        "epochs": f"{round(done + share, 2):g} of {run.num_epochs or '?'}",
        "time of an epoch": page.written_duration(statistics.median(times)) if times else "unknown",
        "steps": f"{steps:,}",
        f"best val {figure.title}": (
            f"{figure.written(best[f'val_{figure.name}'])} (epoch {best.get('epoch', '?')})"
            if best
            else "not evaluated"
        ),
        "last val loss": f"{last['val_loss']:.4f}" if last else "none",
        f"test {figure.title}": "no test" if test is None else figure.written(test),
        f"{run.unit}/s": f"{speed:,.0f}" if speed else "unknown",
        "time": page.written_duration(run.seconds),
        "peak memory of a rank": ", ".join(peaks) or "unknown",
        "skipped steps": f"{skipped:,.0f}",
        "folder": run.name,
    }


def _compared(facts: Sequence[Mapping[str, str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Return rows of the facts that differ, with a column for each run, and rows of those that all runs share."""
    keys = list(dict.fromkeys(key for of_run in facts for key in of_run))
    rows = [[key, *(of_run.get(key, "—") for of_run in facts)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1], [row[:2] for row in rows if len(set(row[1:])) == 1]


def _flattened(values: Mapping[str, Any]) -> dict[str, str]:
    facts: dict[str, str] = {}
    for key, value in values.items():
        if key == "versions" and isinstance(value, dict):
            facts |= {name: str(version) for name, version in value.items()}
        elif isinstance(value, dict):
            facts[key.replace("_", " ")] = ", ".join(f"{name}: {count}" for name, count in value.items())
        else:
            facts[key.replace("_", " ")] = str(value)
    return facts
