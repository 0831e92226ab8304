"""What a run's best weights predict on its validation set: what they confuse, and get most wrong."""

from __future__ import annotations

import heapq
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from hvd_train.data.dataset import DataSet
from hvd_train.errors import UsageError
from hvd_train.progress.order import Cut, InSequence, assignments
from hvd_train.report.confusion import MisclassifiedImage, Predictions
from hvd_train.run import trained_parts
from hvd_train.step import Step
from hvd_train.world.world import LocalWorld, Place

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


@torch.no_grad()
def predict(run: Path, device: str, *, trust: bool = False) -> Predictions:
    """Return what the best weights of a run folder predict for every validation image, each taken once.

    `trust` is as in `run.evaluate`. Raises UsageError where the weights, the data or the model cannot be had.
    """
    config, parts = trained_parts(run, Place(), device, trust=trust)
    loader, data = parts.val_loader, parts.data
    if loader is None:
        raise UsageError("its data set has no validation set")
    model = parts.model.eval()
    counts: Counter[tuple[int, int]] = Counter()
    worst: list[_Mistake] = []
    size = config.batch.eval_batch_size
    autocast = Step(config, LocalWorld(), model, parts.device).autocast()
    try:
        for batch in loader.load(0, assignments(InSequence(loader.num_samples), 0, Cut(size, size), 0, 1)):
            for micro in batch.micro_batches:
                with autocast:
                    logits = model(micro.inputs).float()
                losses = F.cross_entropy(logits, micro.targets, reduction="none").cpu()
                confidences, predicted = (values.cpu() for values in logits.softmax(1).max(1))
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
    finally:
        for each in (parts.train_loader, parts.val_loader, parts.test_loader):
            if each is not None:
                each.close()
    return Predictions(data.classes, counts, tuple(_shown(mistake, data) for mistake in worst))


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
