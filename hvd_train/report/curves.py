"""The charts of runs: what was learned, how fast, and how that grows with the workers."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_train.progress.figures import OF_CLASSES
from hvd_train.report.charts import Axis, Chart, Event, NumberFormat, Series, compact, styled
from hvd_train.run_files.condensed import condensed
from hvd_train.run_files.history import Curve, History, speeds, thinned
from hvd_train.run_files.metrics_file import Record, better_epoch, number

AXES = {"epochs": Axis("epochs"), "samples": Axis("samples"), "time": Axis("time", number_format="duration")}
"""The x axes over which a page can show learning curves; `over` is one of these names."""
_OF_CLASSES = {"loss": "cross entropy", "top1": "right at once", "top5": "among the first five"}
"""What the y axes of classification are called; of another task that is the title of the figure."""
_MOST_MARKS = 100  # of events in a chart
_MOST_EVALUATIONS = 120  # twice as many are points of a line, and of more the best among neighbours
_SPEEDS = 60  # points of a line of throughput: from one step to the next it is noise
_STEEP = 50.0  # a loss whose largest value is so many times its smallest gets a logarithmic axis


def learning(runs: Sequence[History], names: Sequence[str], over: str) -> list[Chart]:
    """Return charts of what the runs measure, and of the learning rate, over one of AXES.

    One run has training and validation in one chart; of several runs each of the two has a chart of its own.
    """
    charts = []
    for figure in dict.fromkeys(figure for run in runs for figure in run.figures):
        metric, title = figure.name, figure.title[:1].upper() + figure.title[1:]
        label = _OF_CLASSES.get(metric, figure.title) if runs[0].figures == OF_CLASSES else figure.title
        number_format: NumberFormat = "share" if figure.form.endswith("%") else "number"
        training = [_training(run, metric, over) for run in runs]
        validation = [_validation(run, metric, over) for run in runs]
        if len(runs) == 1:
            both = (styled(0, "training", *training[0]), styled(1, "validation", *validation[0]))
            axis = _metric_axis(metric, label, number_format, both)
            charts.append(Chart(title, AXES[over], axis, both, events_of(runs[0], over)))
            continue
        for phase, lines in (("training", training), ("validation", validation)):
            series = tuple(styled(n, name, *line) for n, (name, line) in enumerate(zip(names, lines, strict=True)))
            axis = _metric_axis(metric, label, number_format, series)
            charts.append(Chart(f"{title}, {phase}", AXES[over], axis, series))
    return [*charts, _learning_rates(runs, names, over)]


def throughput(runs: Sequence[History], names: Sequence[str]) -> list[Chart]:
    """Return a chart of samples a second over time of all runs, and one of each run with events, which marks them."""
    lines = [speeds(run, _SPEEDS) for run in runs]
    series = tuple(styled(n, name, *line) for n, (name, line) in enumerate(zip(names, lines, strict=True)))
    unit = runs[0].unit if len({run.unit for run in runs}) == 1 else "samples"
    axis = Axis(f"{unit}/s, all workers", zero=True)
    charts = [Chart("Throughput", AXES["time"], axis, series)] if len(runs) > 1 else []
    for index, (run, name, line) in enumerate(zip(runs, names, lines, strict=True)):
        events = events_of(run, "time")
        if len(runs) == 1 or events:
            title = "Throughput" if len(runs) == 1 else f"Throughput of {name}"
            charts.append(Chart(title, AXES["time"], axis, (styled(index, "", *line),), events))
    return charts


def scaling(rows: Sequence[Record]) -> list[Chart]:
    """Return charts of images/s and of efficiency over the number of workers, from the rows of a scaling.json."""
    workers, rates, shares = (
        tuple(number(row, key) for row in rows) for key in ("workers", "images_per_second", "efficiency")
    )
    axis = Axis("workers", log=True, ticks=tuple(sorted({count for count in workers if count})))
    first = next(((n, rate) for n, rate in zip(workers, rates, strict=True) if n and rate), None)
    ideal = tuple(first[1] * n / first[0] if first and n else None for n in workers)
    lines = (styled(0, "measured", workers, rates), styled(1, "ideal", workers, ideal))
    efficiency = Axis("of the ideal images/s", number_format="share", zero=True)
    return [
        Chart("Images/s", axis, Axis("images/s, all workers", log=True), lines),
        Chart("Efficiency", axis, efficiency, (styled(0, "", workers, shares),)),
    ]


def events_of(run: History, over: str) -> tuple[Event, ...]:
    """Return a run's changes of the world, recoveries, resumptions and skipped steps as marks on one of AXES."""
    marks = []
    started = False
    for event in run.events:
        name, label = event.get("name"), ""
        if name == "world":
            before, after = event.get("previous_size"), event.get("world_size")
            label = "recovered" if before == after else f"{before}→{after}"
        elif name == "skipped":
            label = "not finite"
        elif name == "start":
            label, started = "resumed" if started else "", True
        at = _position_of_event(run, event, over) if label else None
        if at is not None:
            marks.append(Event(at, label))
    return tuple(marks[:: len(marks) // _MOST_MARKS + 1])


def evaluations(run: History) -> list[Record]:
    """Return the epochs that were evaluated: one whose loss is not a number still has a top-1."""
    return [epoch for epoch in run.epochs if any(epoch.get(f"val_{metric.name}") is not None for metric in run.figures)]


def _position_of_event(run: History, event: Record, over: str) -> float | None:
    if over == "time":
        return number(event, "elapsed")
    step = number(event, "step")
    if step is None:
        step = run.step_at(event["elapsed"])
    samples, per_epoch = run.samples_at(step) if step is not None else None, run.samples_per_epoch
    if over == "samples" or samples is None:
        return samples
    return samples / per_epoch if per_epoch else None


def _metric_axis(metric: str, label: str, number_format: NumberFormat, series: Sequence[Series]) -> Axis:
    """Return the y axis of a metric: for a loss that falls steeply it is logarithmic."""
    values = sorted(value for line in series for value in line.y if value is not None)
    if metric != "loss" or not values or values[0] <= 0 or values[-1] <= _STEEP * values[0]:
        return Axis(label, number_format=number_format)
    usual = values[len(values) // 2]
    # Without an end, one run that diverges would flatten the others to a line at the bottom.
    end = float(f"{100 * usual:.1g}") if values[-1] > 1000 * usual else None
    cut = "" if end is None else f", cut at {compact(end)}"
    return Axis(f"{label}, logarithmic{cut}", number_format=number_format, log=True, end=end)


def _learning_rates(runs: Sequence[History], names: Sequence[str], over: str) -> Chart:
    rates = [[number(step, "learning_rate") for step in run.steps] for run in runs]
    peaks = [max(known) for values in rates if (known := [rate for rate in values if rate])]
    steep = len(peaks) > 1 and max(peaks) > _STEEP * min(peaks)
    lowest = min(peaks) / 1000 if steep else 0.0  # what falls to 0 would take a logarithmic axis down with it
    lines = []
    for index, (run, name, values) in enumerate(zip(runs, names, rates, strict=True)):
        shown = [rate if rate is not None and rate >= lowest else None for rate in values]
        points = thinned([_position(run, step, over) for step in run.steps], shown)
        lines.append(styled(index, name if len(runs) > 1 else "", *points))
    axis = Axis("of each step" + (", logarithmic" if steep else ""), log=steep)
    return Chart("Learning rate", AXES[over], axis, tuple(lines))


def _training(run: History, metric: str, over: str) -> Curve:
    records = run.steps if len(run.steps) >= len(run.epochs) else run.epochs
    return thinned([_position(run, record, over) for record in records], [number(record, metric) for record in records])


def _validation(run: History, metric: str, over: str) -> Curve:
    records = condensed(evaluations(run), lambda one, other: better_epoch(one, other, run.best), _MOST_EVALUATIONS)
    return [_position(run, r, over) for r in records], [number(r, f"val_{metric}") for r in records]


def _position(run: History, record: Record, over: str) -> float | None:
    """Return where a step or an epoch lies on one of AXES, or None where its record does not say."""
    if over == "time":
        return number(record, "elapsed")
    per_epoch, epoch = run.samples_per_epoch, number(record, "epoch")
    samples = number(record, "samples") if record.get("kind") == "step" else (per_epoch or 0) * (epoch or 0) or None
    if over == "samples":
        return samples
    if record.get("kind") == "epoch":
        return epoch
    return samples / per_epoch if samples is not None and per_epoch else None
