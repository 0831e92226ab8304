"""Compose the page of `hvd-train report` from run folders."""

from collections.abc import Sequence
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

_TITLES = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy"}
_MOST_MEASURES = 12
_MOST_IN_NAME = 3  # settings, and letters of a value: of a path the end tells more
_LONGEST = 30


def compose(paths: Sequence[Path], now: datetime) -> str:
    """Return the page about run folders. Raises UsageError if one is none, or damaged."""
    runs = [read(path) for path in paths]
    settings = [
        {key: value for key, value in run.settings.items() if key != "output_dir"} for run in runs
    ]
    names = _names(runs, settings)
    sections = [
        ("Summary", _summary(runs, names)),
        ("Learning curves", _learning(runs, names)),
        ("Throughput", _throughput(runs, names)),
        ("Where the time goes", _phases(runs, names)),
        ("Configuration", _comparison(names, settings, Config().settings())),
        ("What happened", _events(runs, names)),
        ("Environment", _comparison(names, [_environment(run) for run in runs])),
    ]
    text = page.TEMPLATES.get_template("page.html").render(
        title=f"Training report: {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}",
        subtitle=f"made {now:%Y-%m-%d %H:%M} by hvd-train {__version__}",
        sections=sections,
        script=Markup(page.SCRIPT),  # noqa: S704  # ours
        digest=page.DIGEST,
    )
    return page.clean(text)


def _names(runs: Sequence[History], settings: Sequence[Record]) -> list[str]:
    """Return the names of run folders; if there are many, the first three settings that differ."""
    folders = [run.name for run in runs]
    if len(set(folders)) < len(folders):
        folders = [str(run.path) for run in runs]
    if len(runs) <= page.MANY:
        return folders

    texts = [
        {key: page.written(value)[-_LONGEST:] for key, value in of_run.items()}
        for of_run in settings
    ]
    keys = dict.fromkeys(key for of_run in texts for key in of_run)
    differing = [key for key in keys if len({of_run.get(key) for of_run in texts}) > 1][
        :_MOST_IN_NAME
    ]
    names = [", ".join(f"{key} {of_run.get(key, '?')}" for key in differing) for of_run in texts]
    return [
        f"{name} {of}".lstrip() if names.count(name) > 1 else name
        for name, of in zip(names, folders, strict=True)
    ]


def _summary(runs: Sequence[History], names: Sequence[str]) -> Markup:
    results = [facts(run) for run in runs]
    if len(runs) == 1:
        return Markup().join([pieces.cards(results[0].items())])
    if len(runs) > page.MANY:
        results = [
            {**of_run, "folder": run.name} for run, of_run in zip(runs, results, strict=True)
        ]
    columns = dict.fromkeys(column for of_run in results for column in of_run)
    same = {
        column: results[0][column]
        for column in columns
        if len({of_run.get(column) for of_run in results}) == 1
    }
    rows = [
        [name, *(of_run.get(column, "—") for column in columns if column not in same)]
        for name, of_run in zip(names, results, strict=True)
    ]
    table = pieces.table(["run", *(column for column in columns if column not in same)], rows)
    shared = [pieces.heading("The same in all runs"), pieces.cards(same.items())] if same else []
    return Markup().join([*shared, table])


def _learning(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return the learning curves over epochs, samples or time."""
    text = (
        "Training: means of the logged steps, with random augmentation. "
        "Validation: every sample once."
    )
    text += " The first chart names the lines of all." if len(runs) > page.MANY else ""
    axes: list[_Axis] = [
        ("epochs", "epochs_done", 1.0),
        ("samples", "samples_done", 1.0),
        _time(runs),
    ]
    choices = [(axis[0].partition(",")[0], _learning_charts(runs, names, axis)) for axis in axes]
    return Markup().join([pieces.paragraph(text), pieces.tabs(choices)])


def _throughput(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return samples/s over time, with marks of changes of the world."""
    text = (
        "Of all workers, between two logged steps of an epoch; waiting for a new world counts, "
        "evaluation does not."
    )
    label, _, unit = axis = _time(runs)
    lines: list[Line] = []
    for run, name in zip(runs, names, strict=True):
        times, rates = speeds(run.steps, 60)  # one step and the next differ by noise
        lines.append(
            (
                "" if len(runs) == 1 else name,
                [time / unit for time in times if time is not None],
                rates,
            )
        )
    marks = _marks(runs[0], axis) if len(runs) == 1 else []
    legend = len(runs) <= page.MANY
    charts = [Chart("Samples/s", label, lines, zero=True, events=marks, legend=legend)]
    keys = names if len(runs) > 1 else [""]
    epochs = [
        _line(key, run.epochs, "seconds", ("", "epoch", 1.0))
        for key, run in zip(keys, runs, strict=True)
    ]
    charts.append(
        Chart("Seconds of an epoch, with its evaluation", "epoch", epochs, zero=True, legend=legend)
    )
    return Markup().join([pieces.paragraph(text), pieces.figures(charts)])


def _phases(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return a table of rank 0's mean time in each phase of a step."""
    rows = []
    for run, name in zip(runs, names, strict=True):
        splits = [step["split"] for step in run.steps if isinstance(step.get("split"), dict)]
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


def _events(runs: Sequence[History], names: Sequence[str]) -> Markup:
    """Return the recorded events of each run and their times."""
    bodies = []
    for run, name in zip(runs, names, strict=True):
        rows = [[duration(event["elapsed"]), str(event.get("message", ""))] for event in run.events]
        body = pieces.table(["after", "event"], rows) if rows else pieces.gap("no events recorded")
        bodies.append(pieces.details(f"{name}: {len(rows)} events", body, len(runs) == 1))
    return Markup().join(bodies)


def _learning_charts(runs: Sequence[History], names: Sequence[str], axis: _Axis) -> list[Chart]:
    """Return charts of metrics (training and validation together for a
    single run) and learning rate.
    """
    logged = [run.steps if len(run.steps) >= len(run.epochs) else run.epochs for run in runs]
    # A loss that is not finite is null in JSON, next to the other scores of its epoch.
    evaluated = [
        [
            e
            for e in run.epochs
            if any(name.startswith("val_") and value is not None for name, value in e.items())
        ]
        for run in runs
    ]
    measures = list(dict.fromkeys(name for run in runs for name in run.measures))[:_MOST_MEASURES]
    events = _marks(runs[0], axis) if len(runs) == 1 else []
    keys = names if len(runs) > 1 else [""]
    charts = list[Chart]()
    for metric in measures:
        title = _TITLES.get(metric, label(metric).capitalize())
        training = [
            _line(key, records, metric, axis) for key, records in zip(keys, logged, strict=True)
        ]
        validation = [
            _line(key, records, f"val_{metric}", axis)
            for key, records in zip(keys, evaluated, strict=True)
        ]
        groups = {f"{title}, training": training, f"{title}, validation": validation}
        if len(runs) == 1:
            groups = {title: [("training", *training[0][1:]), ("validation", *validation[0][1:])]}
        for name, lines in groups.items():
            legend = len(runs) <= page.MANY or not charts
            charts.append(
                Chart(name, axis[0], lines, percent=metric in _TITLES, events=events, legend=legend)
            )
    rates = [
        _line(key, run.steps, "learning_rate", axis) for key, run in zip(keys, runs, strict=True)
    ]
    return [*charts, Chart("Learning rate", axis[0], rates, legend=len(runs) <= page.MANY)]


def _line(key: str, records: Sequence[Record], field: str, axis: _Axis) -> Line:
    _, progress, unit = axis
    places = [
        None if (place := number(record, progress)) is None else place / unit for record in records
    ]
    return (key, *thinned(places, [number(record, field) for record in records]))


def _time(runs: Sequence[History]) -> _Axis:
    longest = max(run.seconds for run in runs)
    name, unit = next(
        (unit for unit in (("h", 3600.0), ("min", 60.0)) if longest > 3 * unit[1]), ("s", 1.0)
    )
    return f"time, {name}", "elapsed", unit


def _marks(run: History, axis: _Axis) -> list[tuple[float, str]]:
    """Return places on an axis and labels of resizes, recoveries, resumes and skipped steps."""
    first = next((event for event in run.events if event.get("name") == "start"), None)
    marks = []
    for event in run.events:
        before = event.get("previous_size")
        after = event.get("world_size")
        world = "recovered" if before == after else f"{before}→{after}"
        label = {"world": world, "skipped": "not finite", "start": "resumed"}.get(
            str(event.get("name"))
        )
        place = number(event, axis[1])
        if label and place is not None and event is not first:
            marks.append((place / axis[2], label))
    return marks


def _comparison(
    names: Sequence[str], facts: Sequence[Record], defaults: Record | None = None
) -> Markup:
    """Return what differs between runs, what they share, and what has its default."""
    texts = [{key: page.written(value) for key, value in of_run.items()} for of_run in facts]
    usual = {key: page.written(value) for key, value in (defaults or {}).items()}
    differing = list[list[str]]()
    shared = list[list[str]]()
    default = list[list[str]]()
    for key in dict.fromkeys(key for of_run in texts for key in of_run):
        values = [of_run.get(key, "—") for of_run in texts]
        if len(set(values)) > 1:
            differing.append([key, *values])
        else:
            (default if usual.get(key) == values[0] else shared).append([key, values[0]])
    missing = [name for name, of_run in zip(names, texts, strict=True) if not of_run]
    body = [pieces.gap(f"{first_few(missing)}: not recorded")] if missing else []
    if len(names) > 1:
        is_row = len(names) > page.MANY  # each run
        rows = [["run" if is_row else "", *names], *differing]
        head, *rows = map(list, zip(*rows, strict=True)) if is_row else rows
        table = pieces.table(head, rows) if differing else pieces.paragraph("Nothing.")
        body += [
            pieces.heading("What differs between the runs"),
            table,
            pieces.heading("What all runs share"),
        ]
    if shared:
        body.append(pieces.table(["", "value"], shared))
    if default:
        table = pieces.table(["", "value"], default)
        body.append(pieces.details(f"{len(default)} more, with their default values", table))
    return Markup().join(body)


def _environment(run: History) -> Record:
    facts = {key.replace("_", " "): value for key, value in run.environment.items()}
    versions = facts.pop("versions", None)
    return {**facts, **(versions if isinstance(versions, dict) else {})}
