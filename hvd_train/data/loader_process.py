"""What a loader process does: read the samples of a task, each with random numbers of its own, and collate them.

Every loader process imports this module, so it must not import more than it needs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hvd_train.data.dataset import MapDataset, Mark, Staged, unmarked
from hvd_train.data.lent_memory import Task
from hvd_train.errors import UsageError
from hvd_train.progress import order

_TRANSFORMS = 2  # a part of the key that gives a sample's transforms other random numbers than its other uses


@dataclass(frozen=True)
class Unreadable:
    """An error as a value: DataLoader would wrap an exception in the traceback of the loader process."""

    reason: str


ReadBatch = tuple[Tensor, Tensor, int | None]
"""Images [n, c, h, w], labels [n], and the number of the buffer that may hold the images."""


class TaskReader:
    """Reads a batch for each task; its random numbers depend on seed, epoch and sample, not on rank or process.

    DataLoader takes it as its data set, whose keys are tasks.
    """

    def __init__(self, data: MapDataset, seed: int) -> None:
        self._data, self._seed = data, seed
        self._staged = data if isinstance(data, Staged) else None
        self._buffers: dict[int, Tensor] = {}
        self.mark: Mark = unmarked

    def __getitem__(self, task: Task) -> ReadBatch | Unreadable:
        if task.buffers is not None:
            self._buffers = task.buffers
        items = [self._read(epoch, sample) for epoch, sample in task.samples]
        return _collate(items, task.buffer, None if task.buffer is None else self._buffers.get(task.buffer))

    def _read(self, epoch: int, sample: int) -> tuple[Tensor, int] | Unreadable:
        number = order.key(self._seed, epoch, _TRANSFORMS, sample)
        torch.default_generator.manual_seed(number)  # torch.manual_seed takes a hundred times as long
        random.seed(number)
        np.random.seed(number % 2**32)
        self.mark("random numbers")
        index = sample % len(self._data)  # repeated augmentation numbers the copies of an item anew
        try:
            if self._staged is not None:
                return self._staged.staged_item(index, self.mark)
            item = self._data[index]
            self.mark("items")
            return item
        except UsageError as error:
            return Unreadable(str(error))


def _collate(
    items: list[tuple[Tensor, int] | Unreadable], number: int | None, buffer: Tensor | None
) -> ReadBatch | Unreadable:
    images, labels = [], []
    for item in items:
        if isinstance(item, Unreadable):
            return item
        image, label = item
        images.append(image)
        labels.append(label)
    try:
        return _stack(images, buffer), default_collate(labels), number
    except RuntimeError as error:
        return Unreadable(f"the items of a batch do not fit together: {str(error).splitlines()[0]}")


def _stack(images: list[Tensor], buffer: Tensor | None) -> Tensor:
    """Return a batch [n, c, h, w] whose pixels lie in memory as those of the images do.

    Decoders leave the colours of a pixel side by side; to part them is faster on the device.
    """
    by_pixel = [image.movedim(0, -1) for image in images if torch.is_tensor(image) and image.ndim == 3]
    if len(by_pixel) == len(images) and all(image.is_contiguous() for image in by_pixel):
        return _join(by_pixel, buffer).movedim(-1, 1)
    return _join(images, buffer)


def _join(images: list[Tensor], buffer: Tensor | None) -> Tensor:
    """Return the images as one tensor, in the buffer where they are alike and fit into it."""
    if buffer is not None and all(torch.is_tensor(image) for image in images):
        size = len(images) * images[0].nbytes
        if size <= buffer.numel() and all(image.dtype == images[0].dtype for image in images):
            place = buffer[:size].view(images[0].dtype).view(len(images), *images[0].shape)
            return torch.stack(images, out=place)
    batch: Tensor = default_collate(images)
    return batch
