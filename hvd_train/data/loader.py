"""How samples arrive: loaders that turn the assignments of a rank into batches on its device."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hvd_train import order
from hvd_train.data.augment import Augment
from hvd_train.data.dataset import Arrays, DataSet, MapDataset, Mark, Source, Staged, unmarked
from hvd_train.errors import UsageError
from hvd_train.order import Assignment, Indices, Slot

_AUGMENT_SAMPLE = 2  # tells the random numbers of a sample's transforms from other uses of (seed, epoch, sample)


@dataclass(frozen=True)
class MicroBatch:
    """One slot of a step, ready for the model: inputs [n, c, h, w] float, targets [n], numbers of the samples [n]."""

    number: int
    inputs: Tensor
    targets: Tensor
    samples: Indices


@dataclass(frozen=True)
class Batch:
    """This rank's part of a step; `size` and `num_slots` are those of the whole global batch."""

    size: int
    num_slots: int
    micro_batches: tuple[MicroBatch, ...]


class Loader(Protocol):
    """Source of the batches of an epoch."""

    num_samples: int

    def start(self) -> None:
        """Start what is slow to start, so that the first batch comes as fast as all others."""

    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        """The batches for these assignments, in their order."""

    def watch(self, mark: Mark) -> None:
        """Tell, from now on, of each stage that this process goes through."""

    def close(self) -> None:
        """End loader processes."""


class Prepare:
    """From stored images to model input, on the device: scale, resize, augment, normalise, add channels."""

    def __init__(
        self,
        data: DataSet,
        device: torch.device,
        *,
        image_size: int | None,
        augment: Augment | None,
        colour: bool,
        channels_last: bool = False,
    ) -> None:
        self.augment = augment
        self._size = image_size
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._channels = 3 if colour and data.channels == 1 else None
        self._mean = torch.tensor(data.mean, device=device).view(-1, 1, 1)
        self._std = torch.tensor(data.std, device=device).view(-1, 1, 1)

    def __call__(self, images: Tensor, uniforms: Tensor | None, mark: Mark = unmarked) -> Tensor:
        """Images [n, c, h, w], uint8 or float; `uniforms` [n, k] are the random numbers of the samples."""
        # In place from here on: fresh memory for a batch costs more than the arithmetic.
        images = images.float().div_(255) if images.dtype == torch.uint8 else images.clone()
        if self._size is not None and images.shape[-2:] != (self._size, self._size):
            images = F.interpolate(images, size=(self._size, self._size), mode="bilinear", antialias=True)
        if self.augment is not None and uniforms is not None:
            mark("prepare")
            images = self.augment.apply(images, uniforms)
            mark("augment")
        if len(self._mean):
            images = images.sub_(self._mean).div_(self._std)
        if self._channels is not None:
            images = images.expand(-1, self._channels, -1, -1)
        images = images if self._format is torch.contiguous_format else images.contiguous(memory_format=self._format)
        mark("prepare")
        return images


class ArrayLoader:
    """A data set in memory: it lives on the device, and a batch is one index and a few whole-batch operations."""

    def __init__(self, data: Arrays, prepare: Prepare, device: torch.device, seed: int) -> None:
        self.num_samples = len(data)
        self._images, self._labels = data.images.to(device), data.labels.to(device)
        self._prepare, self._device, self._seed = prepare, device, seed
        self._mark: Mark = unmarked

    def start(self) -> None:
        """Nothing is slow."""

    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        """See Loader."""
        for assignment in work:
            micro = tuple(self._micro_batch(epoch, slot) for slot in assignment.slots)
            yield Batch(assignment.size, assignment.num_slots, micro)

    def _micro_batch(self, epoch: int, slot: Slot) -> MicroBatch:
        rows = torch.from_numpy(slot.indices % len(self._images)).to(self._device)
        uniforms = None
        if self._prepare.augment is not None:
            numbers = order.uniforms(self._seed, epoch, slot.indices, self._prepare.augment.num_uniforms)
            uniforms = torch.from_numpy(numbers).to(self._device)
            self._mark("augment")
        images, labels = self._images.index_select(0, rows), self._labels.index_select(0, rows)
        self._mark("read")
        return MicroBatch(slot.number, self._prepare(images, uniforms, self._mark), labels, slot.indices)

    def watch(self, mark: Mark) -> None:
        """See Loader."""
        self._mark = mark

    def close(self) -> None:
        """Nothing was started."""


class MapLoader:
    """A data set read item by item, in loader processes that start clean (forkserver).

    Forked ones crash after MPI or CUDA has started (horovod issues #1215, #2898).
    """

    def __init__(self, data: MapDataset, prepare: Prepare, device: torch.device, seed: int, num_workers: int) -> None:
        self.num_samples = len(data)
        self._prepare, self._device, self._num_workers = prepare, device, num_workers
        self._keys, self._items = _Keys(), _Seeded(data, seed)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is imported once, not once for each loader process
        self._loader: DataLoader[Any] = DataLoader(
            self._items,  # type: ignore[arg-type]  # a map-style data set with keys of its own
            batch_sampler=self._keys,
            num_workers=num_workers,
            collate_fn=_collate,
            pin_memory=device.type == "cuda",
            persistent_workers=num_workers > 0,
            multiprocessing_context=context if num_workers > 0 else None,
        )

    def start(self) -> None:
        """See Loader: each process reads a sample."""
        first = Slot(0, np.zeros(1, dtype=np.int64))
        self._keys.epoch, self._keys.slots = 0, itertools.repeat(first, self._num_workers)
        for _ in self._loader:
            pass

    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        """See Loader. Raises UsageError that names a sample which cannot be read."""
        ahead, work = itertools.tee(work)
        self._keys.epoch, self._keys.slots = (
            epoch,
            (slot for assignment in ahead for slot in assignment.slots),
        )
        arrived = iter(self._loader)
        for assignment in work:
            micro = tuple(self._micro_batch(slot, next(arrived)) for slot in assignment.slots)
            yield Batch(assignment.size, assignment.num_slots, micro)

    def _micro_batch(self, slot: Slot, arrived: Any) -> MicroBatch:
        if isinstance(arrived, _Unreadable):
            raise UsageError(arrived.reason)
        self._items.mark("collate")
        images, labels = (part.to(self._device, non_blocking=True) for part in arrived)
        self._items.mark("transfer")
        return MicroBatch(slot.number, self._prepare(images, None, self._items.mark), labels, slot.indices)

    def watch(self, mark: Mark) -> None:
        """See Loader. Loader processes stay silent: what happens to single images is told without any."""
        self._items.mark = mark

    def close(self) -> None:
        """End the loader processes."""
        del self._loader


def open_loader(source: Source, prepare: Prepare, device: torch.device, seed: int, num_workers: int) -> Loader:
    """The loader that suits the source."""
    if isinstance(source, Arrays):
        return ArrayLoader(source, prepare, device, seed)
    return MapLoader(source, prepare, device, seed, num_workers)


class _Keys:
    """The keys of each slot in turn, for DataLoader: (epoch, sample) pairs, set anew for each epoch."""

    def __init__(self) -> None:
        self.epoch = 0
        self.slots: Iterable[Slot] = ()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for slot in self.slots:
            yield [(self.epoch, int(index)) for index in slot.indices]


@dataclass(frozen=True)
class _Unreadable:
    """An error as a value: DataLoader would wrap an exception in the worker's traceback."""

    reason: str


class _Seeded:
    """Gives each sample its own random numbers, so that its transforms do not depend on rank, batch or worker."""

    def __init__(self, data: MapDataset, seed: int) -> None:
        self._data, self._seed = data, seed
        self._staged = data if isinstance(data, Staged) else None
        self.mark: Mark = unmarked

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int] | _Unreadable:
        epoch, index = key
        number = order.key(self._seed, epoch, _AUGMENT_SAMPLE, index)
        torch.default_generator.manual_seed(number)  # a hundredth of torch.manual_seed, which looks for GPUs
        random.seed(number)
        np.random.seed(number % 2**32)
        self.mark("random numbers")
        index %= len(self._data)  # copies of a sample have numbers of their own
        try:
            if self._staged is not None:
                return self._staged.staged_item(index, self.mark)
            item = self._data[index]
            self.mark("items")
            return item
        except UsageError as error:
            return _Unreadable(str(error))


def _collate(items: list[tuple[Tensor, int] | _Unreadable]) -> Any:
    for item in items:
        if isinstance(item, _Unreadable):
            return item
    try:
        return default_collate(items)
    except RuntimeError as error:
        return _Unreadable(f"the items of a batch do not fit together: {str(error).splitlines()[0]}")
