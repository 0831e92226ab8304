"""Predict the classes of image files with the weights of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hvd_train.run import trained_parts
from hvd_train.tasks.measures import Each, Measure, Measuring
from hvd_train.tasks.task import Task
from hvd_train.validate import evaluate
from hvd_train.world.world import LocalWorld, Place

_FEW = 64  # files that are read sooner than loader processes start


def predict(
    target: Path, files: Sequence[Path], *, top: int, device: str, trust: bool = False
) -> list[list[tuple[str, float]]]:
    """Return for each image the `top` classes and their probabilities, the most probable class first.

    `target` and `trust` are as in `run.evaluate`. Raises UsageError if the target or a file cannot be used.
    """
    workers = 0 if len(files) < _FEW else None
    config, parts = trained_parts(target, Place(), trust=trust, files=files, device=device, workers=workers)
    classes, loader = parts.data.classes, parts.val_loader
    assert loader is not None

    def measure(model: nn.Module, batch: Any) -> dict[str, Measure]:
        best = model(batch[0]).float().softmax(1).topk(min(top, len(classes)))
        return {"highest": best.values[:, 0], "share": Each(best.values), "number": Each(best.indices)}

    measuring = Measuring(measure, trains=False)
    scores = evaluate(config, parts.device, Task(measure, best=""), measuring, parts.model, loader, LocalWorld())
    shares, numbers = scores.each("share").tolist(), scores.each("number").int().tolist()
    return [[(classes[n], share) for n, share in zip(*row, strict=True)] for row in zip(numbers, shares, strict=True)]
