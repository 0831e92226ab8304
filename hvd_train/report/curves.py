"""Compose sections of the page: learning curves, throughput, phases of a step, events, and measured scaling."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from hvd_train import plain_file
from hvd_train.errors import UsageError
from hvd_train.progress.clock import PHASES, duration
from hvd_train.report import page
from hvd_train.report.page import Chart, Line, pieces
from hvd_train.run_files.history import History, Record, number, speeds, thinned
from hvd_train.run_files.journal import label, labelled

Axis = tuple[str, str, float]  # the label of the x axis, the field of a record with its values, and their unit

_TITLES = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy"}
_MOST_MEASURES = 12


def learning(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return the learning curves over epochs, samples or time."""
    text = "Training: means of the logged steps, with random augmentation. Validation: every sample once."
    text += " The first chart names the lines of all." if len(runs) > page.MANY else ""
    axes: list[Axis] = [("epochs", "epochs_done", 1.0), ("samples", "samples_done", 1.0), _time(runs)]
    choices = [(axis[0].partition(",")[0], _learning_charts(runs, names, axis)) for axis in axes]
    return Markup().join([pieces.paragraph(text), pieces.tabs(choices)])


def throughput(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return samples/s over time, with marks of changes of the world."""
    text = "Of all workers, between two logged steps of an epoch; waiting for a new world counts, evaluation does not."
    label, _, unit = axis = _time(runs)
    lines: list[Line] = []
    for run, name in zip(runs, names, strict=True):
        times, rates = speeds(run.steps, 60)  # one step and the next differ by noise
        lines.append(("" if len(runs) == 1 else name, [time / unit for time in times if time is not None], rates))
    marks, legend = _events(runs[0], axis) if len(runs) == 1 else [], len(runs) <= page.MANY
    charts = [Chart("Samples/s", label, lines, zero=True, events=marks, legend=legend)]
    if any(number(epoch, "seconds") for run in runs for epoch in run.epochs):
        keys = names if len(runs) > 1 else [""]
        epochs = [_line(key, run.epochs, "seconds", ("", "epoch", 1.0)) for key, run in zip(keys, runs, strict=True)]
        charts.append(Chart("Seconds of an epoch, with its evaluation", "epoch", epochs, zero=True, legend=legend))
    return Markup().join([pieces.paragraph(text), pieces.figures(charts)])


def phases(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return a table of rank 0's mean time in each phase of a step."""
    rows, gaps = [], []
    for run, name in zip(runs, names, strict=True):
        splits = [step["split"] for step in run.steps if isinstance(step.get("split"), dict)]
        times = [1e3 * sum(number(split, phase) or 0.0 for split in splits) / (len(splits) or 1) for phase in PHASES]
        if total := sum(times):
            bars = [pieces.bar(f"{time:.2f} ms · {time / total:.0%}", time / total) for time in times]
            rows.append([name, f"{total:.2f} ms", *bars])
        else:
            gaps.append((name, "no time split in the metrics: no logged step has one"))
    text = "Means of the sampled steps on rank 0: `reduction` is the part that the backward pass did not hide."
    table = [pieces.paragraph(text), pieces.table(["run", "step", *PHASES], rows)] if rows else []
    return Markup().join([*table, page.gaps(gaps)])


def events(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return the recorded events of each run and their times."""
    bodies = []
    for run, name in zip(runs, names, strict=True):
        rows = [[duration(event["elapsed"]), str(event.get("message", ""))] for event in run.events]
        body = pieces.table(["after", "event"], rows) if rows else pieces.gap("no events recorded")
        bodies.append(pieces.details(f"{name}: {len(rows)} events", body, len(runs) == 1))
    return Markup().join(bodies)


def _learning_charts(runs: Sequence[History], names: Sequence[str], axis: Axis) -> list[Chart]:
    """Return charts of metrics (training and validation together for a single run) and learning rate."""
    logged = [run.steps if len(run.steps) >= len(run.epochs) else run.epochs for run in runs]
    # A loss that is not finite is null in JSON, next to the other scores of its epoch.
    evaluated = [
        [e for e in run.epochs if any(name.startswith("val_") and value is not None for name, value in e.items())]
        for run in runs
    ]
    measures = list(dict.fromkeys(name for run in runs for name in run.measures))[:_MOST_MEASURES]
    events = _events(runs[0], axis) if len(runs) == 1 else []
    keys = names if len(runs) > 1 else [""]
    charts = list[Chart]()
    for metric in measures:
        title = _TITLES.get(metric, label(metric).capitalize())
        training = [_line(key, records, metric, axis) for key, records in zip(keys, logged, strict=True)]
        validation = [_line(key, records, f"val_{metric}", axis) for key, records in zip(keys, evaluated, strict=True)]
        groups = {f"{title}, training": training, f"{title}, validation": validation}
        if len(runs) == 1:
            groups = {title: [("training", *training[0][1:]), ("validation", *validation[0][1:])]}
        for name, lines in groups.items():
            legend = len(runs) <= page.MANY or not charts
            charts.append(Chart(name, axis[0], lines, percent=metric in _TITLES, events=events, legend=legend))
    rates = [_line(key, run.steps, "learning_rate", axis) for key, run in zip(keys, runs, strict=True)]
    return [*charts, Chart("Learning rate", axis[0], rates, legend=len(runs) <= page.MANY)]


def _line(key: str, records: Sequence[Record], field: str, axis: Axis) -> Line:
    _, progress, unit = axis
    places = [None if (place := number(record, progress)) is None else place / unit for record in records]
    return (key, *thinned(places, [number(record, field) for record in records]))


def _time(runs: Sequence[History]) -> Axis:
    longest = max(run.seconds for run in runs)
    name, unit = next((unit for unit in (("h", 3600.0), ("min", 60.0)) if longest > 3 * unit[1]), ("s", 1.0))
    return f"time, {name}", "elapsed", unit


def _events(run: History, axis: Axis) -> list[tuple[float, str]]:
    """Return places on an axis and labels of resizes, recoveries, resumes and skipped steps."""
    first = next((event for event in run.events if event.get("name") == "start"), None)
    marks = []
    for event in run.events:
        before, after = event.get("previous_size"), event.get("world_size")
        world = "recovered" if before == after else f"{before}→{after}"
        label = {"world": world, "skipped": "not finite", "start": "resumed"}.get(str(event.get("name")))
        place = number(event, axis[1])
        if label and place is not None and event is not first:
            marks.append((place / axis[2], label))
    return marks


RECORD = "scaling.json"
_COLUMNS = (  # the key of a row, the title of its column, and the format of its numbers
    ("workers", "workers", ",.0f"),
    ("learning_rate", "learning rate", ".4g"),
    ("global_batch_size", "global batch", ",.0f"),
    ("steps_per_epoch", "steps per epoch", ",.0f"),
    ("epoch_seconds", "epoch, s", ",.2f"),
    ("epochs", "epochs", ".4g"),
    ("samples_per_second", "samples/s", ",.0f"),
    ("efficiency", "efficiency", ".1%"),
    ("val_loss", "best val loss", ".4f"),
    ("test_loss", "test loss", ".4f"),
)
TITLES = (*(title for _, title, _ in _COLUMNS), "best")


def cells(row: Record) -> list[str]:
    """Return the text of the cells of a row, one for each of TITLES."""
    name = str(row.get("figure", "top1"))  # of the task; earlier versions had only this one
    values = [(number(row, key), form) for key, _, form in _COLUMNS]
    best = number(row, name)
    texts = ["—" if value is None else format(value, form) for value, form in values]
    return [*texts, "—" if best is None else labelled(name, best)]


@dataclass(frozen=True)
class Scaling:
    """A measurement of weak or strong scaling, with a row for each number of workers."""

    path: Path
    mode: str
    rows: tuple[Record, ...]


def read_scaling(path: Path) -> Scaling:
    """Return the measurement in a folder. Raises UsageError if its record cannot be read."""
    try:
        values = json.loads(plain_file.read_text(path / RECORD))
        rows = [row for row in values["rows"] if isinstance(row, dict)]
        rows.sort(key=lambda row: number(row, "workers") or 0)
        return Scaling(path, str(values.get("mode", "")), tuple(rows))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path / RECORD} is not a record of hvd-train bench scaling") from None


def charts(rows: Sequence[Record]) -> dict[str, Chart]:
    """Return charts over workers, by name, from the rows of scaling.json."""
    keys = ("workers", "samples_per_second", "efficiency")
    workers, rates, efficiency = ([number(row, key) for row in rows] for key in keys)
    ticks = sorted({n for n in workers if n and n > 0})
    base, rate = next(((n, rate) for n, rate in zip(workers, rates, strict=True) if n and rate), (1.0, 0.0))
    ideal = [rate * n / base if n and rate else None for n in workers]
    speeds = [("measured", workers, rates), ("ideal", workers, ideal)]
    return {
        "throughput": Chart("Samples/s", "workers", speeds, log=len(ticks) > 1, ticks=ticks),
        "efficiency": Chart("Efficiency", "workers", [("", workers, efficiency)], percent=True, zero=True, ticks=ticks),
    }


def scaling(scalings: Sequence[Scaling]) -> Markup:
    """Return a table and charts of each measurement."""
    body = []
    for measured in scalings:
        body += [
            pieces.heading(f"{measured.path.resolve().name}: {measured.mode} scaling"),
            pieces.table(TITLES, [cells(row) for row in measured.rows], numbers=True),
            pieces.figures(charts(measured.rows).values()),
        ]
    return Markup().join(body)
