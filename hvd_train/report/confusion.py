"""The section on predictions: which classes a run's best weights confuse, and the images that they get most wrong.

`predictions` works them out, which needs torch and the data; this module only shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from hvd_train.report import page
from hvd_train.run_files.history import History

_MOST_CLASSES = 24  # of a confusion matrix; of more, the pairs confused most often are named
_MOST_PAIRS = 20
_MOST_OPEN = 3  # runs whose predictions are shown without a click


@dataclass(frozen=True)
class MisclassifiedImage:
    """A validation image that the best weights got wrong.

    `png` is the picture, `confidence` the probability (0 to 1) of the predicted class, `loss` the cross entropy, and
    `sample` the image's number in the validation set.
    """

    png: bytes
    truth: str
    predicted: str
    confidence: float
    loss: float
    sample: int


@dataclass(frozen=True)
class Predictions:
    """What a run's best weights predict on its validation set.

    `counts[truth, predicted]` are numbers of images by positions in `classes`; pairs that did not occur may be absent.
    `worst` has the misclassified images with the largest loss, in falling order.
    """

    classes: tuple[str, ...]
    counts: Mapping[tuple[int, int], int]
    worst: tuple[MisclassifiedImage, ...]


@dataclass(frozen=True)
class WorstSample:
    """A sample of the validation set: its number, its loss, and its picture (PNG) where it is an image."""

    sample: int
    loss: float
    png: bytes | None


@dataclass(frozen=True)
class WorstSamples:
    """Of `count` validation samples, those with the largest loss under a run's best weights, in falling order."""

    count: int
    samples: tuple[WorstSample, ...]


Outcome = Predictions | WorstSamples | str
"""What there is to show of a run; a text says why there is nothing."""


def section(runs: Sequence[History], names: Sequence[str], predictions: Mapping[Path, Outcome]) -> Markup:
    """Return the predictions of each run, or the text that says why it has none."""
    pieces = []
    for run, name in zip(runs, names, strict=True):
        outcome = predictions.get(run.path, "not asked for")
        if isinstance(outcome, str):
            pieces.append(page.gap(f"{name}: {outcome}" if len(runs) > 1 else outcome))
            continue
        if isinstance(outcome, WorstSamples):
            title, body = "worst samples", _worst_samples(outcome)
        else:
            title = "confusion matrix and worst images"
            body = _confused_classes(outcome) + _worst_images(outcome.worst)
        if len(runs) > 1:
            pieces.append(page.heading(name))
        pieces.append(page.details(title, body) if len(runs) > _MOST_OPEN else body)
    return Markup().join(pieces)


def _confused_classes(predictions: Predictions) -> Markup:
    classes, counts = predictions.classes, predictions.counts
    total = sum(counts.values())
    right = sum(count for (truth, predicted), count in counts.items() if truth == predicted)
    score = f"{right:,} of {total:,} validation images right" + (f" ({right / total:.2%})" if total else "")
    if len(classes) <= _MOST_CLASSES:
        text = f"{score}, by the best weights. Rows: what an image is; columns: what the model predicted."
        numbers = range(len(classes))
        matrix = [[counts.get((truth, predicted), 0) for predicted in numbers] for truth in numbers]
        return page.paragraph(text) + page.matrix(classes, matrix)
    wrong = sorted(((count, *pair) for pair, count in counts.items() if pair[0] != pair[1]), reverse=True)
    rows = [[classes[truth], classes[predicted], f"{count:,}"] for count, truth, predicted in wrong[:_MOST_PAIRS]]
    text = f"{score}, by the best weights. The pairs of classes confused most often:"
    return page.paragraph(text) + page.table(["is", "was taken for", "images"], rows)


def _worst_images(images: Iterable[MisclassifiedImage]) -> Markup:
    captioned = [
        (
            image.png,
            f"is {image.truth}, predicted {image.predicted} ({image.confidence:.0%} sure), loss {image.loss:.2f}, "
            f"no. {image.sample}",
        )
        for image in images
    ]
    none = "None: every validation image was right."
    return page.heading("Worst-classified images") + (page.pictures(captioned) if captioned else page.paragraph(none))


def _worst_samples(outcome: WorstSamples) -> Markup:
    text = page.paragraph(f"Of {outcome.count:,} validation samples, those with the largest loss, by the best weights.")
    pictures = [(one.png, f"loss {one.loss:.4g}, no. {one.sample}") for one in outcome.samples if one.png is not None]
    if pictures:
        return text + page.pictures(pictures)
    return text + page.table(["sample", "loss"], [[f"{one.sample:,}", f"{one.loss:.4g}"] for one in outcome.samples])
