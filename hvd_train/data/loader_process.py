"""What a loader process does: read the samples of a task, each with random numbers of its own, and collate them.

Every loader process imports this module, so it must not import more than it needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hvd_train.data.coded import Coded, CodedBatch, join
from hvd_train.data.dataset import MapDataset, Mark, Staged, unmarked
from hvd_train.data.lent_memory import Task
from hvd_train.data.trees import Packed, Tree, filled, is_tree, leaves, of_tensors, packed, structure, unpacked
from hvd_train.errors import UsageError
from hvd_train.progress import order

_ALIGNED = 64  # bytes, to which the leaves of a tree are aligned in a buffer
_TRANSFORMS = 2  # a part of the key that gives a sample's transforms other random numbers than its other uses


@dataclass(frozen=True)
class Unreadable:
    """An error as a value: DataLoader would wrap an exception in the traceback of the loader process."""

    reason: str


Collate = Callable[[list[Any]], tuple[Tree, Tree]]
"""Makes (inputs, targets) of a list of items."""
ReadBatch = tuple[Tensor | CodedBatch | Packed, Tensor | Packed, int | None]
"""Inputs or what a GPU decodes, targets, and the number of the buffer that may hold the inputs."""


class TaskReader:
    """Reads a batch for each task; its random numbers depend on seed, epoch and sample, not on rank or process.

    DataLoader takes it as its data set, whose keys are tasks.
    """

    def __init__(self, data: MapDataset, seed: int, collate: Collate | None = None) -> None:
        self._data, self._seed, self._own_collate = data, seed, collate
        self._staged = data if isinstance(data, Staged) else None
        self._buffers: dict[int, Tensor] = {}
        self.mark: Mark = unmarked

    def __getitem__(self, task: Task) -> ReadBatch | Unreadable:
        if task.buffers is not None:
            self._buffers = task.buffers
        buffer = None if task.buffer is None else self._buffers.get(task.buffer)
        try:
            items = [self._read(epoch, sample) for epoch, sample in task.samples]
            inputs, targets = self._collate(items, [sample for _, sample in task.samples], buffer)
        except UsageError as error:
            return Unreadable(str(error))
        return inputs, targets, task.buffer

    def _read(self, epoch: int, sample: int) -> Any:
        number = order.key(self._seed, epoch, _TRANSFORMS, sample)
        torch.default_generator.manual_seed(number)  # torch.manual_seed takes a hundred times as long
        random.seed(number)
        np.random.seed(number % 2**32)
        self.mark("random numbers")
        index = sample % len(self._data)  # repeated augmentation numbers the copies of an item anew
        if self._staged is not None:
            return self._staged.staged_item(index, self.mark)
        item = self._data[index]
        self.mark("items")
        return item

    def _collate(
        self, items: list[Any], samples: list[int], buffer: Tensor | None
    ) -> tuple[Tensor | CodedBatch | Packed, Tensor | Packed]:
        """Return the batch of these items. Raises UsageError, with the sample, where they do not fit together."""
        if self._own_collate is not None:
            return _packed(self._own_collate(items))
        try:
            if all(_is_image_of_class(item) for item in items):
                return _images([image for image, _ in items], buffer), default_collate(
                    [label for _, label in items]
                ).long()
            return _trees(items, samples, buffer)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"the items of a batch do not fit together: {reason}") from None


def collated(items: list[Any], collate: Collate | None) -> tuple[Tree, Tree]:
    """Return the inputs and targets of a batch of items as training makes it of them. Raises UsageError as that does.

    No item is a file.
    """
    inputs, targets = TaskReader([], 0, collate)._collate(items, [*range(len(items))], None)
    assert not isinstance(inputs, CodedBatch)
    return unpacked(inputs), unpacked(targets)


def _is_image_of_class(item: Any) -> bool:
    if not _is_pair(item):
        return False
    image, label = item
    is_number = isinstance(label, int) or (
        not getattr(label, "shape", (1,)) and not torch.as_tensor(label).is_floating_point()
    )
    return isinstance(image, (Tensor, Coded)) and is_number


def _is_pair(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and len(item) == 2


def _packed(batch: Any) -> tuple[Tensor | Packed, Tensor | Packed]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(map(is_tree, batch)):
        raise UsageError(
            "collate must return (inputs, targets), tensors or tuples, lists, dicts or dataclasses of them"
        )
    inputs, targets = map(packed, batch)
    return inputs, targets


def _trees(items: list[Any], samples: list[int], buffer: Tensor | None) -> tuple[Tensor | Packed, Tensor | Packed]:
    """Return the batch of items that are (inputs, targets), each a tree of tensors and numbers."""
    found = []
    for item, sample in zip(items, samples, strict=True):
        if not _is_pair(item):
            raise UsageError(f"sample {sample} of the data is no pair; return (inputs, targets)")
        try:
            found.append(tuple(map(of_tensors, item)))
        except TypeError as error:
            raise UsageError(f"sample {sample} of the data holds {error}, which is no tensor and no number") from None
    first = structure(found[0])
    for one, sample in zip(found, samples, strict=True):
        if structure(one) != first:
            raise UsageError(f"sample {sample} of the data is {structure(one)}, and sample {samples[0]} is {first}")
    inputs, targets = ([tree[part] for tree in found] for part in (0, 1))
    return packed(_stacked(inputs, buffer)), packed(_stacked(targets, None))


def _stacked(trees: list[Tree], buffer: Tensor | None) -> Tree:
    """Return a tree whose leaves have those of all trees, one after the other: in the buffer, as far as it goes."""
    columns, begin = [], 0
    for column in zip(*map(leaves, trees), strict=True):
        columns.append(_join([*column], None if buffer is None else buffer[begin:]))
        begin += -(-columns[-1].nbytes // _ALIGNED) * _ALIGNED
    return filled(trees[0], iter(columns))


def _images(images: list[Tensor | Coded], buffer: Tensor | None) -> Tensor | CodedBatch:
    pixels = [image for image in images if not isinstance(image, Coded)]
    return _stack(pixels, buffer) if len(pixels) == len(images) else join(images, buffer)


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
