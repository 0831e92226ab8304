"""What a run's best weights say of its validation set: what they confuse, and get most wrong."""

from __future__ import annotations

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
from hvd_train.progress.order import Cut, InSequence, assignments
from hvd_train.report.report import Missed, Predictions
from hvd_train.run import trained_parts
from hvd_train.step import Step
from hvd_train.world.world import LocalWorld, Place

_WORST = 12
_SIDE = 96  # pixels of a picture in the page: small ones are shown with pixels of that many


@torch.no_grad()
def predict(run: Path, device: str) -> Predictions:
    """Every validation image once. Raises UsageError where the weights, the data or the model cannot be had."""
    config, parts = trained_parts(run, Place(), device)
    loader, data = parts.val_loader, parts.data
    if loader is None:
        raise UsageError("its data set has no validation set")
    model = parts.model.eval()
    counts: Counter[tuple[int, int]] = Counter()
    worst: list[tuple[float, int, Tensor, int, int, float]] = []
    size = config.batch.eval_batch_size
    autocast = Step(config, LocalWorld(), model, parts.device).autocast()
    try:
        for batch in loader.load(0, assignments(InSequence(loader.num_samples), 0, Cut(size, size), 0, 1)):
            for micro in batch.micro_batches:
                with autocast:
                    logits = model(micro.inputs).float()
                losses = F.cross_entropy(logits, micro.targets, reduction="none").cpu()
                truth, sure, said = micro.targets.cpu(), *(t.cpu() for t in logits.softmax(1).max(1))
                counts.update(zip(truth.tolist(), said.tolist(), strict=True))
                for index in losses.topk(min(_WORST, len(losses))).indices.tolist():
                    if said[index] != truth[index]:
                        facts = int(truth[index]), int(said[index]), float(sure[index])
                        sample = int(micro.samples[index])
                        worst.append((float(losses[index]), sample, micro.inputs[index].cpu(), *facts))
                worst = heapq.nlargest(_WORST, worst, key=lambda entry: entry[:2])
    finally:
        for each in (parts.train_loader, parts.val_loader, parts.test_loader):
            if each is not None:
                each.close()
    missed = [
        Missed(_png(image, data), data.classes[truth], data.classes[said], sure, loss, sample)
        for loss, sample, image, truth, said, sure in worst
    ]
    return Predictions(data.classes, counts, tuple(missed))


def _png(image: Tensor, data: DataSet) -> bytes:
    """An image as the model has seen it, with values of 0 to 1 again where it is known how they were changed."""
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
