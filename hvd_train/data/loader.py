"""How samples arrive: loaders that turn the assignments of a rank into batches on its device."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hvd_train.data.augment import Augment
from hvd_train.data.dataset import Arrays, DataSet, MapDataset, Mark, Source, Staged, unmarked
from hvd_train.errors import UsageError
from hvd_train.progress import order
from hvd_train.progress.order import Assignment, Indices, Slot

_AHEAD = 2  # batches that each loader process has ready or in hand
_STEPS = 64  # whose samples are looked up at once: by step it takes as long as to fetch them
_PREPARED = 1 << 26  # bytes that a set in memory may take a second time, as model input
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


class Ahead:
    """Batches, of which the next one can be prepared before its turn: while the ranks add up their gradients."""

    def __init__(self, batches: Iterator[Batch], mark: Mark) -> None:
        """`mark` is told of "data" whenever a batch is there."""
        self._batches, self._mark = batches, mark
        self._next: Batch | Exception | None = None

    def prepare(self) -> None:
        """Have the next batch ready. Whatever is wrong with it is raised in its turn."""
        try:
            self._next = next(self._batches)
        except Exception as error:  # noqa: BLE001  # whatever a data set raises, and the end of it
            self._next = error
        self._mark("data")

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._next is None:
            self.prepare()
        batch, self._next = self._next, None
        if isinstance(batch, Exception):
            raise batch
        assert batch is not None
        return batch


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
        self._normalises = len(data.mean) > 0
        # A number without dimensions is applied to all pixels in half the time.
        shape = () if len(data.mean) == 1 else (-1, 1, 1)
        self._mean, self._std = (torch.tensor(values, device=device).view(shape) for values in (data.mean, data.std))

    def __call__(self, images: Tensor, uniforms: Tensor | None, mark: Mark = unmarked, *, ours: bool = False) -> Tensor:
        """Images [n, c, h, w], uint8 or float; `uniforms` [n, k] are the random numbers of the samples.

        What comes back has memory of its own, as that of the images may be filled anew by others; if they are `ours`,
        it may be theirs.
        """
        # In place from here on: fresh memory for a batch costs more than the arithmetic.
        layout = torch.contiguous_format  # loader processes leave it to us
        if images.dtype == torch.uint8:
            images = images.to(torch.float32, memory_format=layout).div_(255)
        elif not ours:
            images = images.clone(memory_format=layout)
        if self._size is not None and images.shape[-2:] != (self._size, self._size):
            images = F.interpolate(images, size=(self._size, self._size), mode="bilinear", antialias=True)
        if self.augment is not None and uniforms is not None:
            mark("prepare")
            images = self.augment.apply(images, uniforms)
            mark("augment")
        if self._normalises:
            images = images.sub_(self._mean).div_(self._std)
        if self._channels is not None:
            images = images.expand(-1, self._channels, -1, -1)
        images = self.lay_out(images)
        mark("prepare")
        return images

    def lay_out(self, images: Tensor) -> Tensor:
        """Model input in the model's order of channels and pixels, as it is where that is the usual one."""
        return images if self._format is torch.contiguous_format else images.contiguous(memory_format=self._format)


class ArrayLoader:
    """A data set in memory: it lives on the device, and a batch is one index and a few whole-batch operations.

    A small one that nothing random happens to is prepared once, instead of batch by batch.
    """

    def __init__(self, data: Arrays, prepare: Prepare, device: torch.device, seed: int) -> None:
        self.num_samples = len(data)
        self._images, self._labels = data.images.to(device), data.labels.to(device)
        self._prepare, self._device, self._seed = prepare, device, seed
        self._mark: Mark = unmarked
        self._prepared = prepare.augment is None and _nbytes(prepare, self._images) <= _PREPARED
        if self._prepared:
            self._images = prepare(self._images, None).contiguous()

    def start(self) -> None:
        """Nothing is slow."""

    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        """See Loader."""
        work = iter(work)
        while some := list(itertools.islice(work, _STEPS)):
            slots = [slot for assignment in some for slot in assignment.slots]
            drawn = zip(slots, *self._drawn(epoch, slots), strict=True)
            for assignment in some:
                micro = tuple(self._micro_batch(*of_slot) for of_slot in itertools.islice(drawn, len(assignment.slots)))
                yield Batch(assignment.size, assignment.num_slots, micro)

    def _drawn(self, epoch: int, slots: list[Slot]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Of each slot the rows of its samples, and their random numbers where there is a use for them."""
        sizes = [len(slot.indices) for slot in slots]
        samples = np.concatenate([np.empty(0, dtype=np.int64), *(slot.indices for slot in slots)])
        rows = torch.from_numpy(samples % len(self._images)).to(self._device).split_with_sizes(sizes)
        if self._prepare.augment is None:
            return rows, [None] * len(slots)
        numbers = order.uniforms(self._seed, epoch, samples, self._prepare.augment.num_uniforms)
        uniforms = torch.from_numpy(numbers).to(self._device).split_with_sizes(sizes)
        self._mark("augment")
        return rows, uniforms

    def _micro_batch(self, slot: Slot, rows: Tensor, uniforms: Tensor | None) -> MicroBatch:
        inputs, labels = self._images.index_select(0, rows), self._labels.index_select(0, rows)
        self._mark("read")
        if self._prepared:
            inputs = self._prepare.lay_out(inputs)
            self._mark("prepare")
        else:
            inputs = self._prepare(inputs, uniforms, self._mark, ours=True)
        return MicroBatch(slot.number, inputs, labels, slot.indices)

    def watch(self, mark: Mark) -> None:
        """See Loader."""
        self._mark = mark

    def close(self) -> None:
        """Nothing was started."""


def _nbytes(prepare: Prepare, images: Tensor) -> int:
    """Of all images as model input."""
    return prepare(images[:1], None).nbytes * len(images)


class MapLoader:
    """A data set read item by item, in loader processes that start clean (forkserver).

    Forked ones crash after MPI or CUDA has started (horovod issues #1215, #2898).
    """

    def __init__(self, data: MapDataset, prepare: Prepare, device: torch.device, seed: int, num_workers: int) -> None:
        self.num_samples = len(data)
        self._prepare, self._device, self._num_workers = prepare, device, num_workers
        self._tasks, self._items = _Tasks(num_workers), _Seeded(data, seed)
        self._image_bytes = 0  # not known yet
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is imported once, not once for each loader process
        self._loader: DataLoader[Any] = DataLoader(
            self._items,  # type: ignore[arg-type]  # a map-style data set of whole batches, with keys of its own
            batch_size=None,
            sampler=self._tasks,
            num_workers=num_workers,
            prefetch_factor=_AHEAD if num_workers > 0 else None,
            pin_memory=device.type == "cuda",
            persistent_workers=num_workers > 0,
            multiprocessing_context=context if num_workers > 0 else None,
        )

    def start(self) -> None:
        """See Loader: each process reads a sample."""
        first = Slot(0, np.zeros(1, dtype=np.int64))
        self._tasks.epoch, self._tasks.slots = 0, itertools.repeat(first, self._num_workers)
        for arrived in self._loader:
            if not isinstance(arrived, _Unreadable) and torch.is_tensor(arrived[0]):
                self._image_bytes = arrived[0].nbytes

    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        """See Loader. Raises UsageError that names a sample which cannot be read."""
        ahead, work = itertools.tee(work)
        slots: Iterator[Slot] = (slot for assignment in ahead for slot in assignment.slots)
        first = next(slots, None)
        if first is not None:
            self._tasks.lend(len(first.indices) * self._image_bytes)
            slots = itertools.chain([first], slots)
        self._tasks.epoch, self._tasks.slots = epoch, slots
        arrived = iter(self._loader)
        for assignment in work:
            micro = tuple(self._micro_batch(slot, next(arrived)) for slot in assignment.slots)
            yield Batch(assignment.size, assignment.num_slots, micro)

    def _micro_batch(self, slot: Slot, arrived: Any) -> MicroBatch:
        if isinstance(arrived, _Unreadable):
            raise UsageError(arrived.reason)
        self._items.mark("collate")
        *parts, memory = arrived
        images, labels = (part.to(self._device, non_blocking=True) for part in parts)
        self._items.mark("transfer")
        inputs = self._prepare(images, None, self._items.mark)
        self._tasks.give_back(memory)
        return MicroBatch(slot.number, inputs, labels, slot.indices)

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


@dataclass(frozen=True)
class _Task:
    """For a loader process: the samples of a slot, (epoch, sample) each, and the memory to put them into."""

    keys: list[tuple[int, int]]
    memory: int | None
    memories: dict[int | None, Tensor] | None
    """Whose number that is, from now on."""


class _Tasks:
    """A task for each slot in turn, for DataLoader; epoch and slots are set anew for each epoch.

    Images travel in memory that is lent: for each batch that is under way, or in use here. A fresh one for each
    batch, as DataLoader has it, has to be cleared by the kernel, a twelfth of the time of a process that reads JPEG
    files. Who has the number of one has it alone, until the batch is prepared.
    """

    def __init__(self, num_workers: int) -> None:
        self.epoch = 0
        self.slots: Iterable[Slot] = ()
        self._num_workers = num_workers
        self._memories: dict[int | None, Tensor] = {}
        self._free: list[int | None] = []
        self._known = True

    def lend(self, nbytes: int) -> None:
        """Have memory for batches of that size."""
        if self._num_workers == 0 or nbytes <= (self._memories[0].numel() if self._memories else 0):
            return
        # As default_collate has it: not touched here, where a want of shared memory would end the training unsaid.
        enough = range(_AHEAD * self._num_workers + 1)
        of_each = (torch.UntypedStorage._new_shared(nbytes) for _ in enough)  # type: ignore[no-untyped-call]
        self._memories = {n: torch.empty(0, dtype=torch.uint8).set_(storage) for n, storage in enumerate(of_each)}
        self._known = False

    def give_back(self, memory: int | None) -> None:
        """Nobody looks at it any more."""
        if memory is not None:
            self._free.append(memory)

    def __iter__(self) -> Iterator[_Task]:
        self._free = [*self._memories]  # DataLoader begins an epoch when all processes are idle
        for number, slot in enumerate(self.slots):
            keys = [(self.epoch, int(index)) for index in slot.indices]
            memory = self._free.pop() if self._free else None
            yield _Task(keys, memory, None if self._known else self._memories)
            self._known = self._known or number + 1 >= self._num_workers  # the first tasks go to one process each


@dataclass(frozen=True)
class _Unreadable:
    """An error as a value: DataLoader would wrap an exception in the worker's traceback."""

    reason: str


class _Seeded:
    """Reads the samples of tasks, each with random numbers of its own, which depend on no rank, batch or process."""

    def __init__(self, data: MapDataset, seed: int) -> None:
        self._data, self._seed = data, seed
        self._staged = data if isinstance(data, Staged) else None
        self._memories: dict[int | None, Tensor] = {}
        self.mark: Mark = unmarked

    def __getitem__(self, task: _Task) -> tuple[Tensor, Tensor, int | None] | _Unreadable:
        if task.memories is not None:
            self._memories = task.memories
        items = [self._item(epoch, sample) for epoch, sample in task.keys]
        return _collate(items, task.memory, self._memories.get(task.memory))

    def _item(self, epoch: int, index: int) -> tuple[Tensor, int] | _Unreadable:
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


def _collate(
    items: list[tuple[Tensor, int] | _Unreadable], number: int | None, memory: Tensor | None
) -> tuple[Tensor, Tensor, int | None] | _Unreadable:
    """A batch of them, with the number of the memory that it may lie in."""
    images, labels = [], []
    for item in items:
        if isinstance(item, _Unreadable):
            return item
        image, label = item
        images.append(image)
        labels.append(label)
    try:
        return _stacked(images, memory), default_collate(labels), number
    except RuntimeError as error:
        return _Unreadable(f"the items of a batch do not fit together: {str(error).splitlines()[0]}")


def _stacked(images: list[Tensor], memory: Tensor | None) -> Tensor:
    """As they lie in memory: decoders leave the colours of a pixel side by side, and to part them is for the device."""
    rows = [image.movedim(0, -1) for image in images if torch.is_tensor(image) and image.ndim == 3]
    by_pixel = len(rows) == len(images) and all(row.is_contiguous() for row in rows)
    batch = _joined(rows if by_pixel else images, memory)
    return batch.movedim(-1, 1) if by_pixel else batch


def _joined(images: list[Tensor], memory: Tensor | None) -> Tensor:
    if memory is not None and all(torch.is_tensor(image) for image in images):
        size = len(images) * images[0].nbytes
        if size <= memory.numel() and all(image.dtype == images[0].dtype for image in images):
            place = memory[:size].view(images[0].dtype).view(len(images), *images[0].shape)
            return torch.stack(images, out=place)
    batch: Tensor = default_collate(images)
    return batch
