"""The charts of runs: what was learned, how fast, and how that grows with the workers."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_train.report.charts import Axis, Chart, Event, Form, Series, compact, styled
from hvd_train.run_files.history import Curve, History, Record, number, speeds, thinned

AXES = {"epochs": Axis("epochs"), "samples": Axis("samples"), "time": Axis("time", form="duration")}
METRICS: tuple[tuple[str, str, Form], ...] = (
    ("loss", "Loss", "number"),
    ("top1", "Top-1", "share"),
    ("top5", "Top-5", "share"),
)
SPEED = Axis("images/s, all workers", zero=True)
_SPEEDS = 60  # points of a line of throughput: between two steps it is noise
_STEEP = 50.0  # a loss whose largest value is so many times its smallest gets a logarithmic axis


def learning(runs: Sequence[History], names: Sequence[str], over: str) -> list[Chart]:
    """Loss, top-1, top-5 and learning rate over one of AXES; of several runs each kind has a chart."""
    charts = []
    for metric, title, form in METRICS:
        training = [_training(run, metric, over) for run in runs]
        validation = [_validation(run, metric, over) for run in runs]
        if len(runs) == 1:
            series = (styled(0, "training", *training[0]), styled(1, "validation", *validation[0]))
            charts.append(_chart(title, metric, form, over, series, events_of(runs[0], over)))
            continue
        for kind, found in (("training", training), ("validation", validation)):
            lines = tuple(styled(n, name, *line) for n, (name, line) in enumerate(zip(names, found, strict=True)))
            charts.append(_chart(f"{title}, {kind}", metric, form, over, lines))
    return [*charts, _learning_rates(runs, names, over)]


def throughput(runs: Sequence[History], names: Sequence[str]) -> list[Chart]:
    """Images/s over the time, of all runs; and of each to which something happened, with what that was."""
    lines = [speeds(run, _SPEEDS) for run in runs]
    series = tuple(styled(n, name, *line) for n, (name, line) in enumerate(zip(names, lines, strict=True)))
    charts = [Chart("Throughput", AXES["time"], SPEED, series)] if len(runs) > 1 else []
    for place, (run, name, line) in enumerate(zip(runs, names, lines, strict=True)):
        events = events_of(run, "time")
        if len(runs) == 1 or events:
            title = "Throughput" if len(runs) == 1 else f"Throughput of {name}"
            charts.append(Chart(title, AXES["time"], SPEED, (styled(place, "", *line),), events))
    return charts


def scaling(rows: Sequence[Record]) -> list[Chart]:
    """Images/s and efficiency over the number of workers."""
    workers, rates, shares = (
        tuple(number(row, key) for row in rows) for key in ("workers", "images_per_second", "efficiency")
    )
    axis = Axis("workers", log=True, ticks=tuple(sorted({count for count in workers if count})))
    first = next(((n, rate) for n, rate in zip(workers, rates, strict=True) if n and rate), None)
    ideal = tuple(first[1] * n / first[0] if first and n else None for n in workers)
    lines = (styled(0, "measured", workers, rates), styled(1, "ideal", workers, ideal))
    return [
        Chart("Images/s", axis, Axis("images/s, all workers", log=True), lines),
        Chart(
            "Efficiency",
            axis,
            Axis("of the ideal images/s", form="share", zero=True),
            (styled(0, "", workers, shares),),
        ),
    ]


def events_of(run: History, over: str) -> tuple[Event, ...]:
    """Changes of the world, recoveries, resumptions and skipped steps, where they lie on an axis."""
    events = []
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
        at = _event_place(run, event, over) if label else None
        if at is not None:
            events.append(Event(at, label))
    return tuple(events)


def _event_place(run: History, event: Record, over: str) -> float | None:
    if over == "time":
        return number(event, "elapsed")
    step = number(event, "step")
    if step is None:
        before = [record for record in run.steps if record["elapsed"] <= event["elapsed"]]
        step = number(before[-1], "step") if before else None
    samples, each = run.samples_at(step) if step is not None else None, run.samples_per_epoch
    if over == "samples" or samples is None:
        return samples
    return samples / each if each else None


def _chart(
    title: str, metric: str, form: Form, over: str, series: tuple[Series, ...], events: tuple[Event, ...] = ()
) -> Chart:
    values = sorted(value for line in series for value in line.y if value is not None)
    label = {"loss": "cross entropy", "top1": "right at once", "top5": "among the first five"}[metric]
    axis = Axis(label, form=form)
    if metric == "loss" and values and values[0] > 0 and values[-1] > _STEEP * values[0]:
        usual = values[len(values) // 2]
        # One run that diverges would leave the others a line at the bottom.
        end = 100 * usual if values[-1] > 1000 * usual else None
        cut = "" if end is None else f", cut at {compact(float(f'{end:.1g}'))}"
        axis = Axis(f"{label}, logarithmic{cut}", form=form, log=True, end=end and float(f"{end:.1g}"))
    return Chart(title, AXES[over], axis, series, events)


def _learning_rates(runs: Sequence[History], names: Sequence[str], over: str) -> Chart:
    rates = [[number(step, "learning_rate") for step in run.steps] for run in runs]
    peaks = [max(known) for values in rates if (known := [rate for rate in values if rate])]
    steep = len(peaks) > 1 and max(peaks) > _STEEP * min(peaks)
    lowest = min(peaks) / 1000 if steep else 0.0  # what falls to 0 would take a logarithmic axis down with it
    lines = []
    for place, (run, name, values) in enumerate(zip(runs, names, rates, strict=True)):
        shown = [rate if rate is not None and rate >= lowest else None for rate in values]
        points = thinned([_place(run, step, over) for step in run.steps], shown)
        lines.append(styled(place, name if len(runs) > 1 else "", *points))
    axis = Axis("of each step" + (", logarithmic" if steep else ""), log=steep)
    return Chart("Learning rate", AXES[over], axis, tuple(lines))


def _training(run: History, metric: str, over: str) -> Curve:
    records = run.steps if len(run.steps) >= len(run.epochs) else run.epochs
    return thinned([_place(run, record, over) for record in records], [number(record, metric) for record in records])


def _validation(run: History, metric: str, over: str) -> Curve:
    records = evaluations(run)
    return [_place(run, r, over) for r in records], [number(r, f"val_{metric}") for r in records]


def evaluations(run: History) -> list[Record]:
    """Epochs that were evaluated: one whose loss is not a number still has a top-1."""
    return [epoch for epoch in run.epochs if any(epoch.get(f"val_{metric}") is not None for metric, _, _ in METRICS)]


def _place(run: History, record: Record, over: str) -> float | None:
    """Where a step or an epoch lies on an axis."""
    if over == "time":
        return number(record, "elapsed")
    each, epoch = run.samples_per_epoch, number(record, "epoch")
    samples = number(record, "samples") if record.get("kind") == "step" else (each or 0) * (epoch or 0) or None
    if over == "samples":
        return samples
    if record.get("kind") == "epoch":
        return epoch
    return samples / each if samples is not None and each else None
