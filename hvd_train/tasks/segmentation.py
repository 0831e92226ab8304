"""Semantic segmentation: each pixel has a class. Cross entropy over pixels, and the mean IoU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_train.progress.figures import Figure, Sums
from hvd_train.tasks.task import Task

IGNORED = 255
"""The class of a pixel that does not count, as in Pascal VOC and Cityscapes."""


def segmentation(classes: tuple[str, ...]) -> Task:
    """Return the task of giving each pixel its class: logits [n, classes, h, w], targets uint8 or int64 [n, h, w].

    A model may return a dict with the logits under "out", as torchvision's do. The loss of a sample is the mean over
    its pixels. Figures: pixel accuracy, and in evaluations mean IoU (Everingham and others, 2010), the mean over the
    classes of the pixels that are rightly said to be of one, over those that are or are said to be of it. Pixels of
    class 255 do not count.
    """
    number = len(classes)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        of_pixels = F.cross_entropy(_logits(outputs), targets.long(), reduction="none", ignore_index=IGNORED)
        counted = (targets != IGNORED).flatten(1).sum(1).clamp_min(1)
        return of_pixels.flatten(1).sum(1) / counted

    def measures(outputs: Any, targets: Tensor) -> Mapping[str, Tensor]:
        counted = targets != IGNORED
        right = (_logits(outputs).argmax(1) == targets) & counted
        return {"right_pixels": right.flatten(1).sum(1), "pixels": counted.flatten(1).sum(1)}

    def confusion(outputs: Any, targets: Tensor) -> Mapping[str, Tensor]:
        predicted, truth = _logits(outputs).argmax(1).flatten(1), targets.long().flatten(1)
        counted = truth != IGNORED
        pairs = torch.where(counted, truth * number + predicted, 0)
        matrix = torch.zeros(len(truth), number * number, dtype=torch.float64, device=truth.device)
        matrix.scatter_add_(1, pairs, counted.double())
        return {"confusion": matrix.view(-1, number, number)}

    return Task(
        loss=loss,
        measures=measures,
        evaluated_measures=confusion,
        figures=(
            Figure("pixel_accuracy", "pixel accuracy", "higher", ".2%", value=_pixel_accuracy),
            Figure(
                "miou", "mean IoU", "higher", ".2%", value=lambda s, n: float(np.nanmean(_ious(s))), in_training=False
            ),
        ),
        best="miou",
        per_class=lambda sums, count: dict(zip(classes, _ious(sums).tolist(), strict=True)),
        per_class_title="IoU of each class",
        refusal=lambda outputs, targets: (
            None
            if getattr(_logits(outputs), "shape", None) == (len(targets), number, *targets.shape[1:])
            else f"it must return logits [n, {number}, {', '.join(map(str, targets.shape[1:]))}]"
        ),
        outputs=number,
    )


def _logits(outputs: Any) -> Tensor:
    logits: Tensor = outputs["out"] if isinstance(outputs, dict) and "out" in outputs else outputs
    return logits


def _pixel_accuracy(sums: Sums, count: int) -> float:
    return float(sums["right_pixels"]) / max(float(sums["pixels"]), 1.0)


def _ious(sums: Sums) -> npt.NDArray[np.float64]:
    """Return the IoU of each class; NaN for one that no pixel is of, nor was said to be of."""
    matrix = sums["confusion"]
    right = matrix.diagonal()
    either = matrix.sum(0) + matrix.sum(1) - right
    shares: npt.NDArray[np.float64] = np.divide(right, either, out=np.full(len(right), np.nan), where=either > 0)
    return shares
