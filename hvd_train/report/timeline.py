"""Sections on the course of runs: curves, throughput with changes of the world, phases of a step, and events."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from hvd_train.progress.clock import PHASES
from hvd_train.report import curves, page
from hvd_train.run_files import run_folder
from hvd_train.run_files.history import History, number, split_of

_MOST_EVENTS, _MOST_CHANGES = 60, 10


def learning(runs: Sequence[History], names: Sequence[str], keys: Sequence[str]) -> Markup:
    """Return the learning curves over epochs, samples or time. `keys` are the short names that fit into a chart."""
    notes = page.gaps(
        (name, "no validation: the curves show training only")
        for run, name in zip(runs, names, strict=True)
        if run.epochs and not curves.evaluations(run)
    )
    text = "Training: means of the logged steps, with random augmentation. Validation: every sample once."
    legend = page.paragraph(" · ".join(names)) if names != keys and len(runs) > 1 else Markup()
    choices = [(axis, curves.learning(runs, keys, axis)) for axis in curves.AXES]
    return page.paragraph(text) + legend + notes + page.tabs(choices)


def throughput(runs: Sequence[History], names: Sequence[str], keys: Sequence[str]) -> Markup:
    """Return images/s over time, and a table of the changes of the world with what each has cost."""
    text = "Between two logged steps of an epoch; waiting for a new world counts, evaluation does not."
    return page.paragraph(text) + page.figures(curves.throughput(runs, keys)) + _changes_of_world(runs, names)


def phases(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return a table of the time that a step spends in each of its phases."""
    rows, gaps = [], []
    for run, name in zip(runs, names, strict=True):
        split = split_of(run)
        total = sum(split.values()) if split else 0
        if split is None or not total:
            gaps.append((name, "no time split in the metrics: no logged step has one"))
            continue
        cells = [
            (f"{1e3 * split[phase]:.2f} ms · {split[phase] / total:.0%}", split[phase] / total) for phase in PHASES
        ]
        rows.append((name, [(f"{1e3 * total:.2f} ms", 0.0), *cells]))
    text = "Means of the sampled steps on rank 0: `reduction` is the part that the backward pass did not hide."
    table = page.paragraph(text) + page.shares(["run", "step", *PHASES], rows) if rows else Markup()
    return table + page.gaps(gaps)


def events(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return what happened to each run and when, as far as it wrote it down."""
    pieces = []
    for run, name in zip(runs, names, strict=True):
        rows = [[page.written_duration(event["elapsed"]), str(event.get("message", ""))] for event in run.events]
        more = len(rows) - _MOST_EVENTS
        body = page.table(["after", "event"], rows[:_MOST_EVENTS]) if rows else page.gap("no events recorded")
        if more > 0:
            body += page.paragraph(f"and {more} more, in {run.path / run_folder.METRICS}")
        pieces.append(page.details(f"{name}: {len(rows)} events", body) if len(runs) > 1 else body)
    return Markup().join(pieces)


def _changes_of_world(runs: Sequence[History], names: Sequence[str]) -> Markup:
    rows = [
        [
            name,
            f"{page.written(event.get('previous_size'))} → {page.written(event.get('world_size'))}",
            page.written(event.get("step")),
            page.written(event.get("why")),
            f"{number(event, 'seconds') or 0:.1f}",
            page.written(event.get("steps_lost")),
        ]
        for run, name in zip(runs, names, strict=True)
        for event in run.events
        if event.get("name") == "world"
    ]
    table = page.table(["run", "workers", "at step", "why", "seconds to the next step", "steps lost"], rows)
    if len(rows) > _MOST_CHANGES:
        return page.details(f"{len(rows)} changes of the world", table)
    return page.heading("Changes of the world") + table if rows else Markup()
