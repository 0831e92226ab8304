"""Show the classes that a run's best weights confuse, and their worst images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from hvd_train.report.page import pieces
from hvd_train.run_files.history import History

_MOST_CLASSES = 24  # of a confusion matrix; of more classes, the pairs confused most often are named
_MOST_PAIRS = 20
_MOST_OPEN = 3  # runs whose predictions are shown without a click


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
        sure = f"({self.confidence:.0%} sure)"
        return f"is {self.truth}, predicted {self.predicted} {sure}, loss {self.loss:.2f}, no. {self.sample}"


@dataclass(frozen=True)
class Predictions:
    """What a run's best weights predict on its validation set."""

    classes: tuple[str, ...]
    counts: Mapping[tuple[int, int], int]  # images by the positions of (truth, predicted) in `classes`
    worst: tuple[MisclassifiedImage, ...]  # the largest losses, in falling order


def section(runs: Sequence[History], names: Sequence[str], predictions: Mapping[Path, Predictions | str]) -> Markup:
    """Return the predictions of each run, or the text why it has none."""
    parts = []
    for run, name in zip(runs, names, strict=True):
        found = predictions.get(run.path, "not asked for")
        if isinstance(found, str):
            parts.append(pieces.gap(f"{name}: {found}" if len(runs) > 1 else found))
            continue
        pictures = pieces.pictures([(image.png, str(image)) for image in found.worst])
        worst = pictures if found.worst else pieces.paragraph("None: every validation image was right.")
        body = _confused_classes(found) + pieces.heading("Worst-classified images") + worst
        parts.append(pieces.details(f"{name}: confusion matrix and worst images", body, len(runs) <= _MOST_OPEN))
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
    rows = [[classes[truth], classes[predicted], f"{count:,}"] for count, truth, predicted in wrong[:_MOST_PAIRS]]
    return Markup().join([pieces.paragraph(text), pieces.table(["is", "was taken for", "images"], rows)])
