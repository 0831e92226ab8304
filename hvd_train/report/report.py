"""Compose the page of `hvd-train report` from run folders."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from hvd_train._version import __version__
from hvd_train.config import Config
from hvd_train.progress.clock import duration
from hvd_train.report import curves, page
from hvd_train.report.page import pieces
from hvd_train.run_files.history import History, Record, number, read
from hvd_train.run_files.journal import figure, label

_MOST_IN_NAME, _LONGEST = 3, 30  # settings, and letters of a value: of a path the end tells more


def compose(paths: Sequence[Path], now: datetime) -> str:
    """Return the page about run folders. Raises UsageError if one is none."""
    runs = [read(path) for path in paths]
    settings = [{key: value for key, value in run.settings.items() if key != "output_dir"} for run in runs]
    names = _names(runs, settings)
    sections = [
        ("Summary", _summary(runs, names)),
        ("Learning curves", curves.learning(runs, names)),
        ("Throughput", curves.throughput(runs, names)),
        ("Where the time goes", curves.phases(runs, names)),
        ("Configuration", _comparison(names, settings, Config().settings())),
        ("What happened", curves.events(runs, names)),
        ("Environment", _comparison(names, [_environment(run) for run in runs])),
    ]
    return page.TEMPLATES.get_template("page.html").render(
        title=f"Training report: {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}",
        subtitle=f"made {now:%Y-%m-%d %H:%M} by hvd-train {__version__}",
        sections=sections,
        script=Markup(page.SCRIPT),  # noqa: S704  # ours
        digest=page.DIGEST,
    )


def _names(runs: Sequence[History], settings: Sequence[Record]) -> list[str]:
    """Return the names of run folders; if there are many, up to three settings that tell most runs apart."""
    folders = [run.name for run in runs]
    if len(set(folders)) < len(folders):
        folders = [str(run.path) for run in runs]
    if len(runs) <= page.MANY:
        return folders

    def named(keys: Sequence[str]) -> list[str]:
        return [", ".join(f"{key} {of_run.get(key, '?')}" for key in keys) for of_run in texts]

    texts = [{key: page.written(value)[-_LONGEST:] for key, value in of_run.items()} for of_run in settings]
    known, keys = list(dict.fromkeys(key for of_run in texts for key in of_run)), list[str]()
    while len(keys) < _MOST_IN_NAME:
        best = max(known, key=lambda key: len(set(named([*keys, key]))), default="")
        if len(set(named([*keys, best]))) == len(set(named(keys))):
            break
        keys.append(best)
    count = Counter(names := named(keys))
    return [f"{name} {of}".lstrip() if count[name] > 1 else name for name, of in zip(names, folders, strict=True)]


def _summary(runs: Sequence[History], names: Sequence[str]) -> Markup:
    results = [_results(run) for run in runs]
    if len(runs) == 1:
        return Markup().join([pieces.cards(results[0].items()), page.gaps(("", gap) for gap in runs[0].gaps)])
    gaps = page.gaps((name, gap) for run, name in zip(runs, names, strict=True) for gap in run.gaps)
    if len(runs) > page.MANY:
        results = [{**of_run, "folder": run.name} for run, of_run in zip(runs, results, strict=True)]
    columns = dict.fromkeys(column for of_run in results for column in of_run)
    same = {column: results[0][column] for column in columns if len({of_run.get(column) for of_run in results}) == 1}
    rows = [
        [name, *(of_run.get(column, "—") for column in columns if column not in same)]
        for name, of_run in zip(names, results, strict=True)
    ]
    table = pieces.table(["run", *(column for column in columns if column not in same)], rows)
    shared = [pieces.heading("The same in all runs"), pieces.cards(same.items())] if same else []
    return Markup().join([*shared, table, gaps])


def _results(run: History) -> dict[str, str]:
    name, higher = run.goal
    scores = [(score, epoch) for epoch in run.epochs if (score := number(epoch, f"val_{name}")) is not None]
    best = (max if higher else min)(scores, key=lambda scored: scored[0], default=None)
    losses = [loss for epoch in run.epochs if (loss := number(epoch, "val_loss")) is not None]
    done = max((number(epoch, "epoch") or 0.0 for epoch in run.epochs), default=0.0)
    known = [speed for record in (*run.steps, *run.epochs) if (speed := number(record, "samples_per_second"))]
    speed = number(run.summary, "samples_per_second") or (known[-1] if known else None)
    test = number(run.summary, f"test_{name}")
    times = [seconds for epoch in run.epochs if (seconds := number(epoch, "seconds"))]
    return {
        f"best val {label(name)}": f"{figure(name, best[0])} (epoch {best[1].get('epoch', '?')})"
        if best
        else "not evaluated",
        "last val loss": f"{losses[-1]:.4f}" if losses else "none",
        f"test {label(name)}": "no test" if test is None else figure(name, test),
        "state": run.state,
        "model": page.written(run.settings.get("model")),
        "data": page.written(run.settings.get("data")),
        "workers": str(run.world_size or "?"),
        "epochs": f"{done:.0f} of {run.num_epochs or '?'}",
        "steps": f"{run.furthest('step'):,.0f}",
        "samples/s": f"{speed:,.0f}" if speed else "unknown",
        "time": duration(run.seconds),
        "peak memory": _memory(run),
        "an epoch": duration(sum(times) / len(times)) if times else "unknown",
        "skipped steps": f"{run.furthest('skipped_steps'):,.0f}",
    }


def _memory(run: History) -> str:
    """Return the peak memory of a rank, and the mean load of rank 0's GPU."""
    peaks = [peak for record in (*run.epochs, run.summary) if (peak := number(record, "peak_memory_gib"))]
    facts = [f"{max(peaks):.2f} GiB a rank"] if peaks else []
    for name, form in (("utilization", "GPU {:.0%} busy"), ("power_w", "{:.0f} W")):
        loads = (step["gpu"] for step in run.steps if isinstance(step.get("gpu"), dict))
        if values := [value for load in loads if (value := number(load, name)) is not None]:
            facts.append(form.format(sum(values) / len(values)))
    return ", ".join(facts) or "unknown"


def _comparison(names: Sequence[str], facts: Sequence[Record], defaults: Record | None = None) -> Markup:
    """Return what differs between runs, what they share, and what has its default."""
    texts = [{key: page.written(value) for key, value in of_run.items()} for of_run in facts]
    usual = {key: page.written(value) for key, value in (defaults or {}).items()}
    differing, shared, default = list[list[str]](), list[list[str]](), list[list[str]]()
    for key in dict.fromkeys(key for of_run in texts for key in of_run):
        values = [of_run.get(key, "—") for of_run in texts]
        if len(set(values)) > 1:
            differing.append([key, *values])
        else:
            (default if usual.get(key) == values[0] else shared).append([key, values[0]])
    body = [page.gaps((name, "not recorded") for name, of_run in zip(names, texts, strict=True) if not of_run)]
    if len(names) > 1:
        is_row = len(names) > page.MANY  # each run
        rows = [["run" if is_row else "", *names], *differing]
        head, *rows = map(list, zip(*rows, strict=True)) if is_row else rows
        table = pieces.table(head, rows) if differing else pieces.paragraph("Nothing.")
        body += [pieces.heading("What differs between the runs"), table, pieces.heading("What all runs share")]
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
