"""`hvd-train report`: one page about one run or many, made from their folders alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hvd_train._version import __version__
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.progress.clock import PHASES, duration
from hvd_train.report import curves, page
from hvd_train.run_files import durable
from hvd_train.run_files.history import History, Record, number, read, split_of, whole

SCALING = "scaling.json"
_MOST_CLASSES = 24  # of a confusion matrix; of more, the pairs confused most often are named
_MOST_PAIRS, _MOST_EVENTS, _MOST_CHANGES = 20, 60, 10
_SHORT = 9  # letters of a name that leave a chart its room; where one is longer, charts call the runs A, B, C
_ENDS = {"broke off": "broke off (killed or failed)", "unknown": "no word of its end; it ran on another machine"}


@dataclass(frozen=True)
class Missed:
    """An image that the best weights got wrong: what it is, what they said, and how sure they were (0 to 1)."""

    picture: bytes
    truth: str
    said: str
    sure: float
    loss: float
    sample: int


@dataclass(frozen=True)
class Predictions:
    """What a run's best weights say of its validation set; `counts[truth, said]`, worst images first."""

    classes: tuple[str, ...]
    counts: Mapping[tuple[int, int], int]
    missed: tuple[Missed, ...]


@dataclass(frozen=True)
class Scaling:
    """What `hvd-train bench scaling` has measured."""

    path: Path
    mode: str
    rows: tuple[Record, ...]


Told = Mapping[Path, Predictions | str]
"""For each run its predictions, or why there are none."""


def open_all(paths: Sequence[Path]) -> tuple[list[History], list[Scaling]]:
    """The runs and the measured scalings among these folders. Raises UsageError for one that is neither."""
    scalings = [_scaling(path) for path in paths if (path / SCALING).is_file()]
    return [read(path) for path in paths if not (path / SCALING).is_file()], scalings


def check_output(path: Path) -> None:
    """Raise UsageError where a report cannot be written, or would take the place of something else."""
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder; name a file in it, as in {path / 'report.html'}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--output {path}: no folder {path.parent} that can be written to")
    if path.exists():
        try:
            ours = page.GENERATOR.encode() in path.read_bytes()[:1000]
        except OSError as error:
            raise UsageError(f"--output {path}: {error.strerror}") from None
        if not ours:
            raise UsageError(f"--output {path} is there and not a report of ours; name another file, or remove it")


def write(path: Path, text: str) -> None:
    """Write the page: whole or not at all. Raises UsageError."""
    try:
        durable.write_text(path, text)
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None


def compose(runs: Sequence[History], scalings: Sequence[Scaling], told: Told, now: datetime) -> str:
    """The page. Every part is there for every run; where one has nothing to show, it says why."""
    names = labels(runs)
    short = max(map(len, names), default=0) <= _SHORT
    keys = names if short else [_letter(place) for place in range(len(runs))]
    if len(runs) > 1 and not short:
        names = [f"{key}  {name}" for key, name in zip(keys, names, strict=True)]
    sections = []
    if runs:
        sections += [
            ("Summary", _summary(runs, names)),
            ("Learning curves", _learning(runs, names, keys)),
            ("Throughput", _throughput(runs, names, keys)),
            ("Where the time goes", _time(runs, names)),
        ]
    sections.append(("Scaling", _scalings(scalings)))
    if runs:
        sections += [
            ("Predictions", _predictions(runs, names, told)),
            ("Configuration", _configuration(runs, names)),
            ("What happened", _events(runs, names)),
            ("Environment", _environment(runs, names)),
        ]
    what = [runs[0].name] if len(runs) == 1 else [f"{len(runs)} runs"] if runs else []
    what += [f"scaling of {scaling.path.resolve().name}" for scaling in scalings]
    made = f"made {now:%Y-%m-%d %H:%M} by hvd-train {__version__}"
    return page.document(f"Training report: {', '.join(what)}", made, sections)


def labels(runs: Sequence[History]) -> list[str]:
    """A name for each run that no other has, and short where they begin alike."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    first, last = min(names, default=""), max(names, default="")  # what these two begin with, all do
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    cut = max(first[:same].rfind(sign) for sign in "-_/. ") + 1
    if cut > 3 and min(map(len, names)) > cut:
        names = [f"…{name[cut:]}" for name in names]
    return [name if names.count(name) == 1 else f"{place} {name}" for place, name in enumerate(names, 1)]


# --------------------------------------------------------------------------------------------- what runs have in common


def _summary(runs: Sequence[History], names: Sequence[str]) -> str:
    facts = [_facts(run) for run in runs]
    several = len(runs) > 1
    gaps = page.gaps((name if several else "", gap) for run, name in zip(runs, names, strict=True) for gap in run.gaps)
    if not several:
        return page.cards(facts[0].items()) + gaps
    rows = ([name, *one.values()] for name, one in zip(names, facts, strict=True))
    return page.table(["run", *facts[0]], rows) + gaps


def _facts(run: History) -> dict[str, str]:
    best = max(
        (run_ for run_ in run.epochs if number(run_, "val_top1") is not None), key=lambda e: e["val_top1"], default={}
    )
    last = next((epoch for epoch in reversed(run.epochs) if number(epoch, "val_loss") is not None), {})
    done = max((whole(epoch.get("epoch")) or 0 for epoch in run.epochs), default=0)
    steps = max((whole(record.get("step")) or 0 for record in (*run.steps, *run.epochs)), default=0)
    skipped = max((number(step, "skipped_steps") or 0 for step in run.steps), default=0)
    speed = number(run.summary, "images_per_second") or next(
        (number(record, "images_per_second") for record in reversed((*run.steps, *run.epochs))), None
    )
    why = str(run.summary.get("why") or "")
    state = (
        f"finished: {why}" if run.state == "finished" and why not in ("", "done") else _ENDS.get(run.state, run.state)
    )
    return {
        "state": state,
        "model": _value(run.settings.get("model")),
        "data": _value(run.settings.get("data")),
        "workers": str(run.world_size or "?"),
        "epochs": f"{done} of {run.num_epochs or '?'}",
        "steps": f"{steps:,}",
        "best val top-1": f"{best['val_top1']:.2%} (epoch {best['epoch']})" if best else "not evaluated",
        "last val loss": f"{last['val_loss']:.4f}" if last else "none",
        "test top-1": f"{test:.2%}" if (test := number(run.summary, "test_top1")) is not None else "no test",
        "images/s": f"{speed:,.0f}" if speed else "unknown",
        "time": _unbroken(duration(run.seconds)),
        "skipped steps": f"{skipped:,.0f}",
    }


def _configuration(runs: Sequence[History], names: Sequence[str]) -> str:
    settings = [{key: _value(value) for key, value in run.settings.items() if key != "output_dir"} for run in runs]
    usual = {key: _value(value) for key, value in Config().settings().items()}
    differ, shared = _compared(settings)
    chosen = [row for row in shared if usual.get(row[0]) != row[1]]
    rest = [row for row in shared if row not in chosen]
    parts = []
    if len(runs) > 1:
        title = page.heading("What differs among the runs")
        parts += [title, page.table(["setting", *names], differ) if differ else page.paragraph("Nothing.")]
        parts.append(page.heading("What all have"))
    parts.append(page.table(["setting", "value"], chosen) if chosen else "")
    parts.append(page.details(f"{len(rest)} more, with their usual values", page.table(["setting", "value"], rest)))
    return "".join(parts) if any(settings) else page.gap("the run folders have no settings that can be read")


def _compared(facts: Sequence[Mapping[str, str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of what differs (a column for each) and of what all have in common."""
    keys = list(dict.fromkeys(key for one in facts for key in one))
    rows = [[key, *(one.get(key, "—") for one in facts)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1], [row[:2] for row in rows if len(set(row[1:])) == 1]


def _environment(runs: Sequence[History], names: Sequence[str]) -> str:
    facts = [_flat(run.environment) for run in runs]
    differ, shared = _compared(facts)
    gaps = page.gaps((name, "not written down") for name, one in zip(names, facts, strict=True) if not one)
    tables = [page.table(["of", *names], differ)] if differ else []
    tables += [page.table(["of all" if len(runs) > 1 else "fact", "value"], shared)] if shared else []
    return gaps + "".join(tables)


def _flat(values: Mapping[str, Any]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if key == "versions" and isinstance(value, dict):
            flat |= {name: str(version) for name, version in value.items()}
        elif isinstance(value, dict):
            flat[key.replace("_", " ")] = ", ".join(f"{name}: {count}" for name, count in value.items())
        else:
            flat[key.replace("_", " ")] = str(value)
    return flat


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else str(place + 1)


def _unbroken(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)


# --------------------------------------------------------------------------------------------------------------- curves


def _learning(runs: Sequence[History], names: Sequence[str], keys: Sequence[str]) -> str:
    choices = [(name, curves.learning(runs, keys, name)) for name in curves.AXES]
    notes = page.gaps(
        (name, "no validation, so the curves are those of training")
        for run, name in zip(runs, names, strict=True)
        if run.epochs and not curves.evaluations(run)
    )
    text = "Training: means of the logged steps, with the random changes to images. Validation: every sample once."
    who = page.paragraph(" · ".join(names)) if names != keys and len(runs) > 1 else ""
    return page.paragraph(text) + who + notes + page.tabs(choices)


def _throughput(runs: Sequence[History], names: Sequence[str], keys: Sequence[str]) -> str:
    text = "Between two logged steps of an epoch, waiting for another world included, evaluation not."
    return page.paragraph(text) + page.figures(curves.throughput(runs, keys)) + _worlds(runs, names)


def _worlds(runs: Sequence[History], names: Sequence[str]) -> str:
    rows = [
        [
            *(name, f"{_value(e.get('previous_size'))} → {_value(e.get('world_size'))}"),
            *(_value(e.get(key)) for key in ("step", "why")),
            *(f"{number(e, 'seconds') or 0:.1f}", _value(e.get("steps_lost"))),
        ]
        for run, name in zip(runs, names, strict=True)
        for e in run.events
        if e.get("name") == "world"
    ]
    head = ["run", "workers", "at step", "why", "seconds to the next step", "steps lost"]
    table = page.table(head, rows)
    if len(rows) > _MOST_CHANGES:
        return page.details(f"{len(rows)} changes of the world", table)
    return page.heading("Changes of the world") + table if rows else ""


def _time(runs: Sequence[History], names: Sequence[str]) -> str:
    rows, gaps = [], []
    for run, name in zip(runs, names, strict=True):
        split = split_of(run)
        total = sum(split.values()) if split else 0
        if split is None or not total:
            gaps.append((name, "no time split in the metrics (a run of an earlier version, or no step logged)"))
            continue
        cells = [(f"{1e3 * split[part]:.2f} ms · {split[part] / total:.0%}", split[part] / total) for part in PHASES]
        rows.append((name, [(f"{1e3 * total:.2f} ms", 0.0), *cells]))
    text = "Means of the sampled steps on rank 0: `reduction` is what backward did not hide."
    table = page.paragraph(text) + page.shares(["run", "step", *PHASES], rows) if rows else ""
    return table + page.gaps(gaps)


# -------------------------------------------------------------------------------------------------------------- scaling


_COLUMNS = (
    ("workers", "workers", ",.0f"),
    ("learning_rate", "learning rate", ".4g"),
    ("global_batch_size", "global batch", ",.0f"),
    ("steps_per_epoch", "steps per epoch", ",.0f"),
    ("epoch_seconds", "epoch, s", ",.2f"),
    ("images_per_second", "images/s", ",.0f"),
    ("efficiency", "efficiency", ".1%"),
    ("val_loss", "best val loss", ".4f"),
    ("test_loss", "test loss", ".4f"),
    ("top1", "top-1", ".2%"),
)


def _scaling(path: Path) -> Scaling:
    try:
        values = json.loads((path / SCALING).read_text(encoding="utf-8"))
        rows = [row for row in values["rows"] if isinstance(row, dict)]
        return Scaling(
            path, str(values.get("mode", "")), tuple(sorted(rows, key=lambda row: number(row, "workers") or 0))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path / SCALING} is not a record of hvd-train bench scaling") from None


def _scalings(scalings: Sequence[Scaling]) -> str:
    if not scalings:
        return page.paragraph("No measured scaling: name the folder of a `hvd-train bench scaling`, too.")
    return "".join(_one_scaling(scaling) for scaling in scalings)


def _one_scaling(scaling: Scaling) -> str:
    rows = [[_cell(row, key, form) for key, _, form in _COLUMNS] for row in scaling.rows]
    title = page.heading(f"{scaling.path.resolve().name}: {scaling.mode} scaling".replace(":  ", ": "))
    return (
        title
        + page.table([name for _, name, _ in _COLUMNS], rows, numbers=True)
        + page.figures(curves.scaling(scaling.rows))
    )


def _cell(row: Record, key: str, form: str) -> str:
    value = number(row, key)
    return "—" if value is None else format(value, form)


# ----------------------------------------------------------------------------------------------- predictions and events


def _predictions(runs: Sequence[History], names: Sequence[str], told: Told) -> str:
    parts = []
    for run, name in zip(runs, names, strict=True):
        found = told.get(run.path, "not asked for")
        if isinstance(found, str):
            parts.append(page.gap(f"{name}: {found}" if len(runs) > 1 else found))
            continue
        title = page.heading(name) if len(runs) > 1 else ""
        body = _confusion(found) + _missed(found.missed)
        parts.append(title + (page.details("confusion matrix and worst images", body) if len(runs) > 3 else body))
    return "".join(parts)


def _confusion(found: Predictions) -> str:
    total, right = sum(found.counts.values()), sum(n for (truth, said), n in found.counts.items() if truth == said)
    classes = range(len(found.classes))
    score = f"{right:,} of {total:,} validation images right" + (f" ({right / total:.2%})" if total else "")
    text = f"{score}, by the best weights. Rows: what an image is; columns: what the model said."
    if len(found.classes) <= _MOST_CLASSES:
        return page.paragraph(text) + page.matrix(
            found.classes, [[found.counts.get((truth, said), 0) for said in classes] for truth in classes]
        )
    wrong = sorted(((n, *pair) for pair, n in found.counts.items() if pair[0] != pair[1]), reverse=True)[:_MOST_PAIRS]
    rows = ([found.classes[truth], found.classes[said], f"{n:,}"] for n, truth, said in wrong)
    text = f"{score}, by the best weights. The pairs of classes confused most often:"
    return page.paragraph(text) + page.table(["is", "was taken for", "images"], rows)


def _missed(missed: Iterable[Missed]) -> str:
    shown = [
        (one.picture, f"is {one.truth}, said {one.said} ({one.sure:.0%} sure), loss {one.loss:.2f}, no. {one.sample}")
        for one in missed
    ]
    title = page.heading("Worst-classified images")
    return title + (page.pictures(shown) if shown else page.paragraph("None: every validation image was right."))


def _events(runs: Sequence[History], names: Sequence[str]) -> str:
    parts = []
    for run, name in zip(runs, names, strict=True):
        rows = [[_unbroken(duration(event["elapsed"])), str(event.get("message", ""))] for event in run.events]
        more = len(rows) - _MOST_EVENTS
        body = page.table(["after", "event"], rows[:_MOST_EVENTS]) if rows else page.gap("no events written down")
        body += page.paragraph(f"and {more} more, in {run.path / 'metrics.jsonl'}") if more > 0 else ""
        parts.append(page.details(f"{name}: {len(rows)} events", body) if len(runs) > 1 else body)
    return "".join(parts)
