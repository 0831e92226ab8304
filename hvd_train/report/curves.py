"""Compose sections of the page: learning curves, throughput, phases of a step, and events."""

from collections.abc import Sequence

from markupsafe import Markup

from hvd_train.progress.clock import PHASES, duration
from hvd_train.report import page
from hvd_train.report.page import Chart, Line, pieces
from hvd_train.run_files.history import History, Record, number, speeds, thinned
from hvd_train.run_files.journal import label

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
