"""Compose the page of `hvd-train report` from run folders."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from hvd_train._version import __version__
from hvd_train.config import Config
from hvd_train.errors import first_few
from hvd_train.progress.clock import PHASES, duration
from hvd_train.report import page
from hvd_train.report.facts import facts
from hvd_train.report.page import Chart, Line, pieces
from hvd_train.run_files.history import History, Record, number, read, speeds, thinned
from hvd_train.run_files.journal import label

# the label of the x axis, the field of a record with its values, and their unit
_Axis = tuple[str, str, float]

Runs = Mapping[str, History]  # by unique names

_TITLES = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy"}
_MOST_CHARTS = 24  # of measures


def compose(paths: Sequence[Path], now: datetime) -> str:
    """Return the page about run folders. Raises UsageError if one is none, or damaged."""
    histories = [read(path) for path in paths]
    runs = {run.name: run for run in histories}
    if len(runs) < len(histories):
        runs = {str(run.path): run for run in histories}
    settings = {
        name: {key: value for key, value in run.settings.items() if key != "output_dir"}
        for name, run in runs.items()
    }
    environments = {name: _environment(run) for name, run in runs.items()}
    sections = [
        ("Summary", _summary(runs)),
        ("Learning curves", _learning(runs)),
        ("Throughput", _throughput(runs)),
        ("Where the time goes", _phases(runs)),
        ("Configuration", _comparison(settings, Config().settings())),
        ("What happened", _events(runs)),
        ("Environment", _comparison(environments)),
    ]
    text = page.TEMPLATES.get_template("page.html").render(
        title=f"Training report: {next(iter(runs)) if len(runs) == 1 else f'{len(runs)} runs'}",
        subtitle=f"made {now:%Y-%m-%d %H:%M} by hvd-train {__version__}",
        sections=sections,
        script=Markup(page.SCRIPT),  # noqa: S704  # ours
        digest=page.DIGEST,
    )
    return page.clean(text)


def _summary(runs: Runs) -> Markup:
    same, table = _compared({name: facts(run) for name, run in runs.items()})
    body = [pieces.cards(same.items())] if same else []
    if len(runs) > 1:
        body = [pieces.heading("The same in all runs"), *body, table]
    return Markup().join(body)


def _compared(facts: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, str], Markup]:
    """Return the facts that all runs share, and a table of the others, with a row for each run."""
    same = {}
    different = []
    for fact in dict.fromkeys(fact for of_run in facts.values() for fact in of_run):
        values = {of_run.get(fact, "—") for of_run in facts.values()}
        if len(values) == 1:
            same[fact] = values.pop()
        else:
            different.append(fact)
    rows = [
        [name, *(of_run.get(fact, "—") for fact in different)] for name, of_run in facts.items()
    ]
    return same, pieces.table(["run", *different], rows)


def _learning(runs: Runs) -> Markup:
    """Return the learning curves over epochs, samples or time."""
    text = (
        "Training: means of the logged steps, with random augmentation. "
        "Validation: every sample once."
    )
    axes: list[_Axis] = [
        ("epochs", "epochs_done", 1.0),
        ("samples", "samples_done", 1.0),
        _time(runs),
    ]
    choices = [(axis[0].partition(",")[0], _learning_charts(runs, axis)) for axis in axes]
    return Markup().join([pieces.paragraph(text), pieces.tabs(choices)])


def _learning_charts(runs: Runs, axis: _Axis) -> list[Chart]:
    """Return charts of measures and learning rate over an axis.

    A single run has training and validation in one chart.
    """
    logged = {name: max(run.steps, run.epochs, key=len) for name, run in runs.items()}
    # A loss that is not finite is null in JSON, next to the other scores of its epoch.
    evaluated = {
        name: [
            epoch
            for epoch in run.epochs
            if any(score.startswith("val_") and epoch[score] is not None for score in epoch)
        ]
        for name, run in runs.items()
    }
    events = _marks(runs, axis)
    charts = list[Chart]()
    for measure in dict.fromkeys(name for run in runs.values() for name in run.measures):
        title = _TITLES.get(measure, label(measure).capitalize())
        training = _lines(logged, measure, axis)
        validation = _lines(evaluated, f"val_{measure}", axis)
        groups = {f"{title}, training": training, f"{title}, validation": validation}
        if len(runs) == 1:
            groups = {title: [("training", *training[0][1:]), ("validation", *validation[0][1:])]}
        charts += [
            Chart(name, axis[0], lines, percent=measure in _TITLES, events=events)
            for name, lines in groups.items()
        ]
    rates = _lines({name: run.steps for name, run in runs.items()}, "learning_rate", axis)
    return [*charts[:_MOST_CHARTS], Chart("Learning rate", axis[0], rates)]


def _throughput(runs: Runs) -> Markup:
    """Return samples/s over time, with marks of changes of the world, and seconds of epochs."""
    text = (
        "Of all workers, between two logged steps of an epoch; waiting for a new world counts, "
        "evaluation does not."
    )
    title, _, unit = axis = _time(runs)
    # one step and the next differ by noise
    measured = {
        name: [
            {"time": at, "speed": speed} for at, speed in zip(*speeds(run.steps, 60), strict=True)
        ]
        for name, run in runs.items()
    }
    rates = _lines(measured, "speed", ("", "time", unit))
    of_epochs = {name: run.epochs for name, run in runs.items()}
    epochs = _lines(of_epochs, "seconds", ("", "epoch", 1.0))
    charts = [
        Chart("Samples/s", title, rates, zero=True, events=_marks(runs, axis)),
        Chart("Seconds of an epoch, with its evaluation", "epoch", epochs, zero=True),
    ]
    return Markup().join([pieces.paragraph(text), pieces.figures(charts)])


def _lines(records: Mapping[str, Sequence[Record]], field: str, axis: _Axis) -> list[Line]:
    """Return a line for each run, of a field of its records over an axis."""
    _, progress, unit = axis
    lines = list[Line]()
    for name, of_run in records.items():
        places = [number(record, progress) for record in of_run]
        scaled = [None if place is None else place / unit for place in places]
        values = [number(record, field) for record in of_run]
        lines.append((name if len(records) > 1 else "", thinned(scaled), thinned(values)))
    return lines


def _time(runs: Runs) -> _Axis:
    longest = max(run.seconds for run in runs.values())
    name, unit = next(
        (unit for unit in (("h", 3600.0), ("min", 60.0)) if longest > 3 * unit[1]), ("s", 1.0)
    )
    return f"time, {name}", "elapsed", unit


def _marks(runs: Runs, axis: _Axis) -> list[tuple[float, str]]:
    """Return places on an axis and labels of resizes, recoveries, resumes, and odd steps.

    Several runs have none.
    """
    events = next(iter(runs.values())).events if len(runs) == 1 else ()
    first = next((event for event in events if event.get("name") == "start"), None)
    marks = []
    for event in events:
        before = event.get("previous_size")
        after = event.get("world_size")
        world = "recovered" if before == after else f"{before}→{after}"
        label = {
            "world": world,
            "skipped": "not finite",
            "recheck": "computed differently",
            "start": "resumed",
        }.get(str(event.get("name")))
        place = number(event, axis[1])
        if label and place is not None and event is not first:
            marks.append((place / axis[2], label))
    return marks


def _phases(runs: Runs) -> Markup:
    """Return a table of rank 0's mean time in each phase of a step."""
    rows = []
    for name, run in runs.items():
        splits = run.mappings("split")
        times = [
            1e3 * sum(number(split, phase) or 0.0 for split in splits) / (len(splits) or 1)
            for phase in PHASES
        ]
        total = sum(times)
        bars = [
            pieces.bar(f"{time:.2f} ms · {time / total:.0%}", time / total) if total else "—"
            for time in times
        ]
        rows.append([name, f"{total:.2f} ms" if total else "not measured", *bars])
    text = (
        "Means of the sampled steps on rank 0: `reduction` is the part that the "
        "backward pass did not hide."
    )
    return Markup().join([pieces.paragraph(text), pieces.table(["run", "step", *PHASES], rows)])


def _events(runs: Runs) -> Markup:
    """Return the recorded events of each run and their times."""
    bodies = []
    for name, run in runs.items():
        rows = [[duration(event["elapsed"]), str(event.get("message", ""))] for event in run.events]
        body = pieces.table(["after", "event"], rows) if rows else pieces.gap("no events recorded")
        bodies.append(pieces.details(f"{name}: {len(rows)} events", body, len(runs) == 1))
    return Markup().join(bodies)


def _comparison(facts: Mapping[str, Record], defaults: Record | None = None) -> Markup:
    """Return what differs between runs, what they share, and what has its default."""
    texts = {
        name: {key: page.written(value) for key, value in of_run.items()}
        for name, of_run in facts.items()
    }
    usual = {key: page.written(value) for key, value in (defaults or {}).items()}
    same, table = _compared(texts)
    default = {key: value for key, value in same.items() if usual.get(key) == value}
    shared = {key: value for key, value in same.items() if key not in default}
    missing = [name for name, of_run in texts.items() if not of_run]
    body = [pieces.gap(f"{first_few(missing)}: not recorded")] if missing else []
    if len(facts) > 1:
        body += [
            pieces.heading("What differs between the runs"),
            table,
            pieces.heading("What all runs share"),
        ]
    if shared:
        body.append(pieces.table(["", "value"], shared.items()))
    if default:
        more = pieces.table(["", "value"], default.items())
        body.append(pieces.details(f"{len(default)} more, with their default values", more))
    return Markup().join(body)


def _environment(run: History) -> Record:
    facts = {key.replace("_", " "): value for key, value in run.environment.items()}
    versions = facts.pop("versions", None)
    return {**facts, **(versions if isinstance(versions, dict) else {})}
