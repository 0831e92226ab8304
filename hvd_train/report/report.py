"""Compose the page of `hvd-train report` from run folders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from hvd_train._version import __version__
from hvd_train.config import Config
from hvd_train.progress.clock import duration
from hvd_train.report import curves, page
from hvd_train.report.curves import Scaling
from hvd_train.report.page import pieces
from hvd_train.run_files.history import History, Record, number, read
from hvd_train.run_files.journal import figure, label

_MOST_CLASSES = 24  # of a confusion matrix; of more classes, the pairs confused most often are named


@dataclass(frozen=True)
class MisclassifiedImage:
    """A validation image that the best weights got wrong."""

    png: bytes
    truth: str
    predicted: str
    confidence: float  # the probability (0 to 1) of the predicted class
    loss: float  # cross entropy
    sample: int  # the number in the validation set

    def __str__(self) -> str:
        answer = f"predicted {self.predicted} ({self.confidence:.0%} sure)"
        return f"is {self.truth}, {answer}, loss {self.loss:.2f}, no. {self.sample}"


@dataclass(frozen=True)
class Predictions:
    """What a run's best weights predict on its validation set."""

    classes: tuple[str, ...]
    counts: Mapping[tuple[int, int], int]  # images by the positions of (truth, predicted) in `classes`
    worst: tuple[MisclassifiedImage, ...]  # the largest losses, in falling order


def open_all(paths: Sequence[Path]) -> tuple[list[History], list[Scaling]]:
    """Return the runs and the measured scalings in these folders. Raises UsageError if a folder is neither."""
    scalings = [curves.read_scaling(path) for path in paths if (path / curves.RECORD).is_file()]
    return [read(path) for path in paths if not (path / curves.RECORD).is_file()], scalings


def compose(
    runs: Sequence[History], scalings: Sequence[Scaling], predictions: Mapping[Path, Predictions | str], now: datetime
) -> str:
    """Return the page. `predictions` has, by the path of a run, its predictions or a text why there are none."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    settings = [{key: value for key, value in run.settings.items() if key != "output_dir"} for run in runs]
    sections = [("Scaling", curves.scaling(scalings))]
    if runs:
        sections = [
            ("Summary", _summary(runs, names)),
            ("Learning curves", curves.learning(runs, names)),
            ("Throughput", curves.throughput(runs, names)),
            ("Where the time goes", curves.phases(runs, names)),
            *sections,
            ("Predictions", _shown(runs, names, predictions)),
            ("Configuration", _comparison(names, settings, Config().settings())),
            ("What happened", curves.events(runs, names)),
            ("Environment", _comparison(names, [_environment(run) for run in runs])),
        ]
    subjects = [runs[0].name] if len(runs) == 1 else [f"{len(runs)} runs"] if runs else []
    subjects += [f"scaling of {measured.path.resolve().name}" for measured in scalings]
    return page.TEMPLATES.get_template("page.html").render(
        title=f"Training report: {', '.join(subjects)}",
        subtitle=f"made {now:%Y-%m-%d %H:%M} by hvd-train {__version__}",
        sections=sections,
    )


def _summary(runs: Sequence[History], names: Sequence[str]) -> Markup:
    results = [_results(run) for run in runs]
    if len(runs) == 1:
        return Markup().join([pieces.cards(results[0].items()), page.gaps(("", gap) for gap in runs[0].gaps)])
    rows = [[name, *of_run.values()] for name, of_run in zip(names, results, strict=True)]
    gaps = page.gaps((name, gap) for run, name in zip(runs, names, strict=True) for gap in run.gaps)
    return Markup().join([pieces.table(["run", *results[0]], rows), gaps])


def _results(run: History) -> dict[str, str]:
    name, higher = run.goal
    scores = [(score, epoch) for epoch in run.epochs if (score := number(epoch, f"val_{name}")) is not None]
    best = (max if higher else min)(scores, key=lambda scored: scored[0], default=None)
    losses = [loss for epoch in run.epochs if (loss := number(epoch, "val_loss")) is not None]
    done = max((number(epoch, "epoch") or 0.0 for epoch in run.epochs), default=0.0)
    known = [speed for record in (*run.steps, *run.epochs) if (speed := number(record, "samples_per_second"))]
    speed = number(run.summary, "samples_per_second") or (known[-1] if known else None)
    test = number(run.summary, f"test_{name}")
    return {
        "state": run.state,
        "model": page.written(run.settings.get("model")),
        "data": page.written(run.settings.get("data")),
        "workers": str(run.world_size or "?"),
        "epochs": f"{done:.0f} of {run.num_epochs or '?'}",
        "steps": f"{run.furthest('step'):,.0f}",
        f"best val {label(name)}": f"{figure(name, best[0])} (epoch {best[1].get('epoch', '?')})"
        if best
        else "not evaluated",
        "last val loss": f"{losses[-1]:.4f}" if losses else "none",
        f"test {label(name)}": "no test" if test is None else figure(name, test),
        "samples/s": f"{speed:,.0f}" if speed else "unknown",
        "time": duration(run.seconds),
        "skipped steps": f"{run.furthest('skipped_steps'):,.0f}",
    }


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
        body += [
            pieces.heading("What differs between the runs"),
            pieces.table(["", *names], differing) if differing else pieces.paragraph("Nothing."),
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


def _shown(runs: Sequence[History], names: Sequence[str], predictions: Mapping[Path, Predictions | str]) -> Markup:
    parts = []
    for run, name in zip(runs, names, strict=True):
        found = predictions.get(run.path, "not asked for")
        if isinstance(found, str):
            parts.append(pieces.gap(f"{name}: {found}" if len(runs) > 1 else found))
            continue
        pictures = pieces.pictures([(image.png, str(image)) for image in found.worst])
        worst = pictures if found.worst else pieces.paragraph("None: every validation image was right.")
        body = _confused_classes(found) + pieces.heading("Worst-classified images") + worst
        parts.append(pieces.details(f"{name}: confusion matrix and worst images", body, len(runs) <= 3))
    return Markup().join(parts)


def _confused_classes(found: Predictions) -> Markup:
    classes, counts = found.classes, found.counts
    total = sum(counts.values())
    right = sum(count for (truth, predicted), count in counts.items() if truth == predicted)
    share = f" ({right / total:.2%})" if total else ""
    score = f"{right:,} of {total:,} validation images right{share}, by the best weights."
    if len(classes) <= _MOST_CLASSES:
        text = f"{score} Rows: what an image is; columns: what the model predicted."
        numbers = range(len(classes))
        matrix = [[counts.get((truth, predicted), 0) for predicted in numbers] for truth in numbers]
        return Markup().join([pieces.paragraph(text), pieces.matrix(classes, matrix)])
    text = f"{score} The pairs of classes confused most often:"
    wrong = sorted(((count, *pair) for pair, count in counts.items() if pair[0] != pair[1]), reverse=True)
    rows = [[classes[truth], classes[predicted], f"{count:,}"] for count, truth, predicted in wrong[:20]]
    return Markup().join([pieces.paragraph(text), pieces.table(["is", "was taken for", "images"], rows)])
