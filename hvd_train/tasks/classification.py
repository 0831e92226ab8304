"""Classification: each sample has one class. Cross entropy, and whether the class is the first or among the first five.

The targets are the numbers of classes [n]; mixup and cutmix make shares of classes of them, [n, classes].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from hvd_train.progress.figures import Figure, Sums
from hvd_train.tasks.task import Task

_PLACES = 5


def classification(classes: tuple[str, ...], label_smoothing: float = 0.0) -> Task:
    """Return the task of telling these classes apart."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)

    def of_each_class(logits: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        seen = F.one_hot(targets, len(classes)).bool()
        return {"seen": seen, "right": seen & hits(logits, targets)["hits"][:, :1]}

    return Task(
        loss=loss,
        evaluated_loss=lambda logits, targets: F.cross_entropy(logits.float(), targets, reduction="none"),
        measures=hits,
        evaluated_measures=of_each_class,
        figures=(
            Figure("top1", "top-1", "higher", ".2%", value=lambda sums, count: float(sums["hits"][0]) / count),
            Figure("top5", "top-5", "higher", ".2%", value=lambda sums, count: float(sums["hits"].sum()) / count),
        ),
        best="top1",
        per_class=lambda sums, count: dict(zip(classes, _shares(sums), strict=True)),
        per_class_title="top-1 of each class",
        refusal=lambda logits, targets: (
            None
            if isinstance(logits, Tensor) and logits.shape == (len(targets), len(classes))
            else f"it must return logits of shape [batch, {len(classes)}]"
        ),
        outputs=len(classes),
        images_of_classes=True,
    )


def hits(logits: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
    """Return whether a sample's class has the highest logit, the second, ... the fifth: bool [n, 5].

    `logits` are [n, classes], `targets` int64 [n]. With fewer classes nothing is at the last places.
    """
    places = min(_PLACES, logits.shape[1])
    match = logits.topk(places, dim=1).indices == targets.unsqueeze(1)
    return {"hits": F.pad(match, (0, _PLACES - places)) if places < _PLACES else match}


def _shares(sums: Sums) -> list[float]:
    """Return the share of right samples of each class; NaN where there are none."""
    pairs = zip(sums["right"].tolist(), sums["seen"].tolist(), strict=True)
    return [right / seen if seen else float("nan") for right, seen in pairs]
