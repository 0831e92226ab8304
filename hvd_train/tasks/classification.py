"""Classification: cross entropy with label smoothing, mixup and cutmix; top-1 and top-5 accuracy."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train.config import Config
from hvd_train.data.augment import mixer
from hvd_train.tasks.measures import Mean, Measure, Total
from hvd_train.tasks.task import Scores, Task

Batch = tuple[Tensor, Tensor]  # images [n, c, h, w] and class numbers int64 [n]


def classification(config: Config, classes: tuple[str, ...]) -> Task:
    """Return the task of a model that maps images to logits [n, number of `classes`]."""
    mix, smoothing = mixer(config.data, len(classes)), config.optimizer.label_smoothing

    def measure(model: nn.Module, batch: Batch) -> dict[str, Measure]:
        images, targets = mix(*batch)
        logits = model(images)
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
        by_place = hits(logits, batch[1]).sum(dim=0, dtype=torch.float32)
        return {"loss": Mean(loss), "top1": Mean(by_place[0]), "top5": Mean(by_place.sum())}

    def evaluate(model: nn.Module, batch: Batch) -> dict[str, Measure]:
        images, targets = batch
        logits = model(images)
        match = hits(logits, targets)
        top1, top5 = match[:, 0], match.any(dim=1)
        none = torch.zeros(len(classes), dtype=torch.float64, device=targets.device)
        right, seen = (none.index_add(0, targets, each.double()) for each in (top1, torch.ones_like(top1)))
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        return {"loss": losses, "top1": top1, "top5": top5, "right": Total(right), "seen": Total(seen)}

    def per_class(scores: Scores) -> dict[str, float]:
        shares = scores.total("right") / scores.total("seen")
        return dict(zip(classes, shares.tolist(), strict=True))

    return Task(measure, evaluate, best="top1", higher=True, sample="image", per_class=per_class)


def hits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return whether a target has the highest logit, the second, ... the fifth, bool [n, 5 or the number of classes].

    `logits` are [n, classes], `targets` int64 [n].
    """
    return logits.topk(min(5, logits.shape[1]), dim=1).indices == targets.unsqueeze(1)
