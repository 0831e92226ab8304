"""Tasks by name: the built-in ones, for items that are (inputs, targets), or the user's own."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train import plugin
from hvd_train.config import Config, DataConfig
from hvd_train.data.random_numbers import seed_all
from hvd_train.errors import UsageError, place_in_user_code, unknown_name
from hvd_train.progress.order import Indices
from hvd_train.tasks.task import Mean, Measure, Scores, Task, Total

OwnTask = Callable[[Config], Task]

CLASSIFICATION = "classification"
VOID = 255  # the class of pixels that do not count, as in Pascal VOC and Cityscapes
IGNORED = -100  # the token that is not predicted, as in torch and Hugging Face
Batch = tuple[Tensor, Tensor]  # inputs and targets


def _answers(model: nn.Module, batch: Any) -> Batch:
    """Return a model's outputs as float32, and the targets.

    Raises UsageError for items or outputs of another form.

    torchvision's segmentation returns a dict with "out", Hugging Face's models an object with
    `logits`.
    """
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(
            f"a batch of the data is ({kinds}): each item must be (input, target), "
            "of tensors or numbers"
        )
    try:
        found: Any = model(parts[0])
    except IndexError as error:  # of a token that an embedding does not have
        values = f"{parts[0].min()} to {parts[0].max()}" if parts[0].numel() else "nothing"
        where = place_in_user_code(error)
        raise UsageError(
            f"the model cannot take inputs with values of {values}: {error}{where}"
        ) from error
    found = (
        found["out"]
        if isinstance(found, dict) and "out" in found
        else getattr(found, "logits", found)
    )
    if not isinstance(found, Tensor):
        raise UsageError(f"the model returns {type(found).__name__}; it must return a tensor")
    return found.float(), parts[1]


def _logits(model: nn.Module, images: Tensor, num_classes: int) -> Tensor:
    """Return a classifier's output. Raises UsageError for another shape."""
    logits = model(images)
    if isinstance(logits, Tensor) and logits.shape == (len(images), num_classes):
        return logits
    found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    raise UsageError(
        f"the model returns {found}; it must return logits of shape [batch, "
        f"num_classes = {num_classes}]"
    )


def _alike(model: nn.Module, batch: Any) -> Batch:
    """Return outputs and targets of one shape.

    Raises UsageError for others, since torch would repeat one of them.
    """
    output, targets = _answers(model, batch)
    if output.shape == (*targets.shape, 1):
        output = output.squeeze(-1)
    if targets.shape == (*output.shape, 1):
        output = output.unsqueeze(-1)
    if output.shape != targets.shape:
        shapes = f"{list(output.shape)} for targets of {list(targets.shape)}"
        raise UsageError(f"the model returns {shapes}; it must return their shape")
    return output, targets.float()


class _Classes:
    """Checks that targets are classes which the model has; it knows them since its first output.

    On a GPU a wrong one would end the process without its number.
    """

    def __init__(self, task: str, void: int | None = None) -> None:
        self._task = task
        self._void = void
        self._count = 0

    def known(self, count: int, targets: Tensor) -> None:
        """Note the number of the model's classes, and check the first targets.

        Raises UsageError.
        """
        if not self._count:
            self._count = count
            self(("", targets.cpu()), np.arange(len(targets)))

    def __call__(self, batch: Any, samples: Indices) -> None:
        """Raise UsageError for a class that the model does not have."""
        void = "" if self._void is None else f", and {self._void} means that it does not count"
        wanted = (
            f"the model has classes 0 to {self._count - 1}{void}; change the target, "
            "or the model's classes"
        )
        if self._count:
            _check_range(
                batch, samples, self._count - 1, self._void, f"--task {self._task}: {wanted}"
            )


def _check_range(batch: Any, samples: Indices, highest: int, void: int | None, wanted: str) -> None:
    """Raise UsageError for a target that is neither from 0 to `highest` nor `void`."""
    targets = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    if not isinstance(targets, Tensor) or targets.dtype == torch.bool or not targets.numel():
        return
    least, most = targets.aminmax()
    if least >= 0 and most <= highest:  # the usual case, in one pass
        return
    wrong = ~((targets >= 0) & (targets <= highest))  # NaN, too
    if void is not None:
        wrong &= targets != void
    for place in wrong.nonzero()[:1]:
        value = targets[tuple(place)].item()
        raise UsageError(f"sample {samples[int(place[0])]} has the target {value}: {wanted}")


def mixer(config: DataConfig, num_classes: int) -> Callable[[Tensor, Tensor], Batch]:
    """Return mixup or cutmix of a micro-batch, one of them at random, or
    neither, as the config says.

    Zhang et al., arXiv 1710.09412; Yun et al., arXiv 1905.04899. Targets become shares, [n,
    classes].
    """
    if not (config.mixup or config.cutmix):
        return lambda images, targets: (images, targets)
    from torchvision.transforms import v2

    kinds = ((v2.MixUp, config.mixup), (v2.CutMix, config.cutmix))
    mixers = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha > 0]
    found: Callable[[Tensor, Tensor], Batch] = (
        mixers[0] if len(mixers) == 1 else v2.RandomChoice(mixers)
    )
    return found


def classification(config: Config, classes: tuple[str, ...]) -> Task:
    """Return the task of a model that maps images to logits [n, number of `classes`]."""
    mix = mixer(config.data, len(classes))
    smoothing = config.optimizer.label_smoothing

    def measure(model: nn.Module, batch: Batch) -> dict[str, Measure]:
        images, targets = mix(*batch)
        logits = _logits(model, images, len(classes))
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
        by_place = hits(logits.detach(), batch[1]).sum(dim=0, dtype=torch.float32)
        return {"loss": Mean(loss), "top1": Mean(by_place[0]), "top5": Mean(by_place.sum())}

    def evaluate(model: nn.Module, batch: Batch) -> dict[str, Measure]:
        images, targets = batch
        logits = _logits(model, images, len(classes))
        match = hits(logits, targets)
        top1 = match[:, 0]
        top5 = match.any(dim=1)
        none = torch.zeros(len(classes), dtype=torch.float64, device=targets.device)
        right = none.index_add(0, targets, top1.double())
        seen = none.index_add(0, targets, torch.ones_like(top1, dtype=torch.float64))
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        return {
            "loss": losses,
            "top1": top1,
            "top5": top5,
            "right": Total(right),
            "seen": Total(seen),
        }

    def per_class(scores: Scores) -> dict[str, float]:
        shares = scores.total("right") / scores.total("seen")
        return dict(zip(classes, shares.tolist(), strict=True))

    return Task(measure, evaluate, best="top1", higher=True, sample="image", per_class=per_class)


def hits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return whether a target has the highest logit, the second, ... the fifth, bool [n, 5
    or the number of classes].

    `logits` are [n, classes], `targets` int64 [n].
    """
    return logits.topk(min(5, logits.shape[1]), dim=1).indices == targets.unsqueeze(1)


def regression() -> Task:
    """Return a task of the mean squared error to targets [n] or [n, ...]; `error`
    is the mean absolute one.
    """

    def measure(model: nn.Module, batch: Batch) -> dict[str, Measure]:
        output, targets = _alike(model, batch)
        distance = (output - targets).reshape(len(targets), -1)
        return {"loss": distance.square().mean(1), "error": distance.detach().abs().mean(1)}

    return Task(measure, best="error")


def multi_label() -> Task:
    """Return a task of independent labels, targets [n, labels] of 0 and 1; the best
    has the highest F1 over all.
    """

    def check(batch: Any, samples: Indices) -> None:
        wanted = (
            "--task multi-label: targets are 0 or 1 (or shares between); leave out or "
            "decide what is not known"
        )
        _check_range(batch, samples, 1, None, wanted)

    def measure(model: nn.Module, batch: Batch) -> dict[str, Measure]:
        logits, targets = _alike(model, batch)
        right = targets > 0.5
        found = logits.detach() > 0
        counts = torch.stack([(right & found).sum(), right.sum() + found.sum()])
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
        return {"loss": losses, "all_right": (right == found).all(1), "counts": Total(counts)}

    def summary(scores: Scores) -> dict[str, float]:
        hits, marked = scores.total("counts").tolist()
        return {"f1": 2 * hits / marked if marked else math.nan}

    return Task(measure, summary=summary, best="f1", higher=True, check=check)


def segmentation(classes: tuple[str, ...]) -> Task:
    """Return a task of a class for each pixel, targets [n, h, w]; 255 does not count.

    The best has the mean IoU.
    """
    check = _Classes("segmentation", VOID)

    def measure(model: nn.Module, batch: Batch) -> dict[str, Measure]:
        logits, masks = _answers(model, batch)
        known = masks != VOID
        count = logits.shape[1]
        check.known(count, masks)
        loss = F.cross_entropy(logits, masks.long(), ignore_index=VOID, reduction="sum")
        answers = logits.detach().argmax(1)
        # Without a wait of the host for the number of known pixels: others go to a cell behind the
        # table.
        cells = torch.where(known, count * masks.long() + answers, count**2).flatten()
        pairs = torch.zeros(count**2 + 1, dtype=torch.float64, device=cells.device)
        pairs = pairs.index_add(0, cells, torch.ones_like(cells, dtype=torch.float64))[:-1]
        right = Mean(((answers == masks) & known).sum(), known.sum())
        return {
            "loss": Mean(loss, known.sum()),
            "right": right,
            "confusion": Total(pairs.view(count, count)),
        }

    def iou(scores: Scores) -> Tensor:
        table = scores.total("confusion")
        return table.diagonal() / (table.sum(0) + table.sum(1) - table.diagonal())

    def per_class(scores: Scores) -> dict[str, float]:
        shares = iou(scores).tolist()
        return dict(
            zip(
                classes if len(classes) == len(shares) else map(str, range(len(shares))),
                shares,
                strict=True,
            )
        )

    def summary(scores: Scores) -> dict[str, float]:
        return {"mean_iou": float(iou(scores).nanmean())}

    shown = {"sample": "image", "per_class": per_class}
    return Task(measure, summary=summary, best="mean_iou", higher=True, check=check, **shown)  # type: ignore[arg-type]


def language_model() -> Task:
    """Return a task of the next token, targets [n, length]; -100 does not count.

    Each token weighs the same.
    """
    check = _Classes("language-model", IGNORED)

    def measure(model: nn.Module, batch: Batch) -> dict[str, Measure]:
        logits, following = _answers(model, batch)
        check.known(logits.shape[-1], following)
        loss = F.cross_entropy(
            logits.flatten(0, -2), following.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return {"loss": Mean(loss, (following != IGNORED).sum())}

    def summary(scores: Scores) -> dict[str, float]:
        return {"perplexity": math.exp(min(scores["loss"], 700.0))}

    return Task(measure, summary=summary, best="perplexity", sample="sequence", check=check)


_TASKS: dict[str, Callable[[Config, tuple[str, ...]], Task]] = {
    CLASSIFICATION: classification,
    "regression": lambda config, classes: regression(),
    "multi-label": lambda config, classes: multi_label(),
    "segmentation": lambda config, classes: segmentation(classes),
    "language-model": lambda config, classes: language_model(),
}


def check_name(name: str) -> None:
    """Raise UsageError if the task is unknown or cannot be imported."""
    if plugin.is_reference(name):
        plugin.load("task", name)
    elif name not in _TASKS:
        raise unknown_name("task", name, _TASKS)


def open_task(config: Config, classes: tuple[str, ...], own: Task | OwnTask | None = None) -> Task:
    """Return the task that is `own`, that it returns, or that the config names.

    Raises UsageError if the user's function returns something else, or a task that cannot measure.
    """
    name = config.model.task
    if own is None and name in _TASKS:
        return _TASKS[name](config, classes)
    if isinstance(own, Task):
        task = own
    else:
        seed_all(config.seed)
        function = own or plugin.load("task", name)
        task = plugin.call(f"--task {name}", function, "config", config)
    if not isinstance(task, Task):
        raise UsageError(f"--task {name}: it returned {type(task).__name__}, not an hvd_train.Task")
    if isinstance(task.measure, nn.Module):
        raise UsageError(
            f"Task({type(task.measure).__name__}()): give a function measure(model, batch), which "
            "returns {'loss': one number for each sample}"
        )
    return task
