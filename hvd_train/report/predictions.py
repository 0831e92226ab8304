"""Compute what a run's best weights predict on its validation set."""

import heapq
import io
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from hvd_train.data.dataset import DataSet
from hvd_train.errors import UsageError
from hvd_train.progress.order import BatchLayout, InSequence, assignments
from hvd_train.report.confusion import MisclassifiedImage, Predictions
from hvd_train.report.samples import restored
from hvd_train.run import trained_parts
from hvd_train.step import Step
from hvd_train.world.world import LocalWorld, Place

_WORST, _SIDE = 12, 96  # images, and the pixels of the longer side in the page


@torch.no_grad()
def predict(run: Path, device: str, *, trust: bool = False) -> Predictions:
    """Return what a run's best weights predict; `trust` is as in `run.evaluate`. Raises UsageError."""
    config, parts = trained_parts(run, Place(), device, trust=trust)
    loader, data = parts.val_loader, parts.data
    if loader is None:
        raise UsageError("its data set has no validation set")
    model, size = parts.model.eval(), config.batch.eval_batch_size
    counts: Counter[tuple[int, int]] = Counter()
    worst: list[tuple[float, int, Tensor, int, int, float]] = []
    autocast = Step(config, LocalWorld(), model, parts.device).autocast()
    try:
        for batch in loader.load(0, assignments(InSequence(loader.num_samples), 0, BatchLayout(size, size), 0, 1)):
            for micro in batch.micro_batches:
                with autocast:
                    logits = model(micro.inputs).float().cpu()
                truth = micro.targets.cpu()
                confidences, predicted = logits.softmax(1).max(1)
                counts.update(zip(truth.tolist(), predicted.tolist(), strict=True))
                losses = F.cross_entropy(logits, truth, reduction="none") * (predicted != truth)
                for index in losses.topk(min(_WORST, len(losses))).indices.tolist():
                    numbers = int(truth[index]), int(predicted[index]), float(confidences[index])
                    worst.append((float(losses[index]), int(micro.samples[index]), micro.inputs[index].cpu(), *numbers))
                worst = heapq.nlargest(_WORST, (one for one in worst if one[0] > 0), key=lambda one: one[:2])
    finally:
        for each in filter(None, (parts.train_loader, parts.val_loader, parts.test_loader)):
            each.close()
    images = (
        MisclassifiedImage(_png(image, data), data.classes[truth], data.classes[predicted], confidence, loss, sample)
        for loss, sample, image, truth, predicted, confidence in worst
    )
    return Predictions(data.classes, counts, tuple(images))


def _png(image: Tensor, data: DataSet) -> bytes:
    pixels = (restored(image, data) * 255).round().to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).numpy()
    picture, buffer = Image.fromarray(pixels), io.BytesIO()
    picture.thumbnail((_SIDE, _SIDE))
    picture.save(buffer, format="png")
    return buffer.getvalue()
