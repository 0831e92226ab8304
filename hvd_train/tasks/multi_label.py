"""Classification with several labels: a sample has any of the classes. Binary cross entropy, mean average precision."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from hvd_train.progress.figures import Figure, Sums
from hvd_train.tasks.task import Task


def multi_label(classes: tuple[str, ...]) -> Task:
    """Return the task of saying which of these classes a sample has: logits [n, classes], targets 0 or 1 [n, classes].

    The loss of a sample is the mean over classes. Figures: the share of labels that are right (a logit above 0 says
    yes), and in evaluations mean average precision, the mean over classes of the area below precision over recall, of
    the scores of all samples (Everingham and others, 2010; without interpolation).
    """
    number = len(classes)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits.float(), targets.float(), reduction="none").mean(1)

    def measures(logits: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {"right_labels": ((logits > 0) == (targets > 0.5)).float().mean(1)}

    def scores(logits: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {"scores": logits.float(), "truth": targets.float()}

    return Task(
        loss=loss,
        measures=measures,
        stored=scores,
        figures=(
            Figure(
                "label_accuracy", "labels right", "higher", ".2%", value=lambda sums, n: float(sums["right_labels"]) / n
            ),
            Figure(
                "map", "mAP", "higher", ".2%", value=lambda sums, n: float(_mean(precisions(sums))), in_training=False
            ),
        ),
        best="map",
        per_class=lambda sums, count: dict(zip(classes, precisions(sums).tolist(), strict=True)),
        per_class_title="average precision of each class",
        refusal=lambda logits, targets: (
            None
            if isinstance(logits, Tensor) and logits.shape == targets.shape == (len(targets), number)
            else f"it must return logits [n, {number}], and targets must be [n, {number}], of 0 and 1"
        ),
        outputs=number,
    )


def precisions(sums: Sums) -> npt.NDArray[np.float64]:
    """Return the average precision of each class, of `scores` and `truth` [samples, classes]; NaN without a sample.

    Samples of equal scores count as found together, so that it does not depend on their order.
    """
    found = [
        _average_precision(scores, truth > 0.5) for scores, truth in zip(sums["scores"].T, sums["truth"].T, strict=True)
    ]
    return np.array(found)


def _average_precision(scores: npt.NDArray[np.float64], truth: npt.NDArray[np.bool_]) -> float:
    if not truth.any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # the last one of each group of equal scores
    right = np.cumsum(truth[order])[ends]
    precision, recall = right / (ends + 1), right / truth.sum()
    return float(np.sum(precision * np.diff(recall, prepend=0.0)))


def _mean(values: npt.NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
