"""What a run's best weights predict on its validation set: what they confuse, and what has the largest loss."""

from __future__ import annotations

import heapq
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from hvd_train.data.batches import MicroBatch
from hvd_train.data.dataset import DataSet
from hvd_train.errors import UsageError
from hvd_train.parts import Parts
from hvd_train.predict import logits_of, passes
from hvd_train.report.confusion import MisclassifiedImage, Predictions, WorstSample, WorstSamples
from hvd_train.run import trained_parts
from hvd_train.tasks.task import Outputs
from hvd_train.world.world import Place

_WORST = 12
_SIDE = 96  # pixels: a larger picture is made smaller for the page


@dataclass(frozen=True)
class _Mistake:
    """A misclassified image, as the model has taken it."""

    loss: float
    sample: int
    image: Tensor
    truth: int
    predicted: int
    confidence: float


def predict(run: Path, device: str, *, trust: bool = False) -> Predictions | WorstSamples:
    """Return what the best weights of a run folder do with every validation sample, each taken once.

    `trust` is as in `run.evaluate`. Raises UsageError where the weights, the data or the model cannot be had.
    """
    config, parts = trained_parts(run, Place(), device, trust=trust)
    if parts.val_loader is None:
        raise UsageError("its data set has no validation set")
    found = passes(config, parts, parts.val_loader)
    return _of_classes(parts, found) if parts.meter.task.images_of_classes else _of_others(parts, found)


def _of_classes(parts: Parts, found: Iterable[tuple[MicroBatch, Outputs, Tensor]]) -> Predictions:
    counts: Counter[tuple[int, int]] = Counter()
    worst: list[_Mistake] = []
    for micro, outputs, losses in found:
        confidences, predicted = (values.cpu() for values in logits_of(outputs).softmax(1).max(1))
        truth = micro.targets.cpu()
        counts.update(zip(truth.tolist(), predicted.tolist(), strict=True))
        for index in losses.topk(min(_WORST, len(losses))).indices.tolist():
            if predicted[index] != truth[index]:
                worst.append(
                    _Mistake(
                        float(losses[index]),
                        int(micro.samples[index]),
                        micro.inputs[index].cpu(),
                        int(truth[index]),
                        int(predicted[index]),
                        float(confidences[index]),
                    )
                )
        worst = heapq.nlargest(_WORST, worst, key=lambda mistake: (mistake.loss, mistake.sample))
    return Predictions(parts.data.classes, counts, tuple(_shown(mistake, parts.data) for mistake in worst))


def _of_others(parts: Parts, found: Iterable[tuple[MicroBatch, Outputs, Tensor]]) -> WorstSamples:
    worst: list[tuple[float, int, Tensor | None]] = []
    count = 0
    for micro, _, losses in found:
        count += len(losses)
        are_images = isinstance(micro.inputs, Tensor) and micro.inputs.ndim == 4 and micro.inputs.shape[1] in (1, 3)
        for index in losses.topk(min(_WORST, len(losses))).indices.tolist():
            image = micro.inputs[index].cpu() if are_images else None
            worst.append((float(losses[index]), int(micro.samples[index]), image))
        worst = heapq.nlargest(_WORST, worst, key=lambda sample: sample[:2])
    samples = [
        WorstSample(number, loss, None if image is None else _png(image, parts.data)) for loss, number, image in worst
    ]
    return WorstSamples(count, tuple(samples))


def _shown(mistake: _Mistake, data: DataSet) -> MisclassifiedImage:
    return MisclassifiedImage(
        _png(mistake.image, data),
        data.classes[mistake.truth],
        data.classes[mistake.predicted],
        mistake.confidence,
        mistake.loss,
        mistake.sample,
    )


def _png(image: Tensor, data: DataSet) -> bytes:
    """Return a normalised image [channels, height, width] as a PNG file.

    Its values are brought back to 0 to 1 by the data set's mean and standard deviation or, where it has none, by the
    least and the largest value of the image.
    """
    values = image.float()
    if data.mean:
        mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (data.mean, data.std))
        values = values * std + mean
    else:
        values = (values - values.min()) / (values.max() - values.min()).clamp_min(1e-12)
    pixels = (values.clamp(0, 1) * 255).round().to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).numpy()
    picture, buffer = Image.fromarray(pixels), io.BytesIO()
    if max(picture.size) > _SIDE:
        picture.thumbnail((_SIDE, _SIDE))
    picture.save(buffer, format="png")
    return buffer.getvalue()
