"""Turn a rank's assignments into batches on its device, from memory or by loader processes."""

import itertools
import multiprocessing
import random
import signal
import sys
import traceback
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from typing_extensions import override

from hvd_train.data.by_value import ByValue
from hvd_train.data.dataset import Arrays, Augment, DataSet, MapDataset, Source
from hvd_train.data.trees import map_tensors
from hvd_train.errors import UsageError, in_user_code
from hvd_train.progress import order
from hvd_train.progress.order import Batch, MicroBatch

_AT_ONCE = 256  # micro-batches: to look up the samples of one alone takes as long as to fetch their images
_TRANSFORMS = 2  # in a key of random numbers: separates a sample's transforms from other uses of the seed
_Sample = tuple[int, int]  # epoch, and number in the data set
Collate = Callable[[list[Any]], Any]  # makes a batch of items


class Prepare:
    """Scales, resizes, augments and normalises whole batches of images, and repeats grey as three channels."""

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
        """`image_size` (pixels; None: as stored) is the side of the result; `colour` asks for three channels."""
        self.augment = augment
        self._size, self._channels_last = image_size, channels_last
        self._channels = 3 if colour and data.channels == 1 else None
        self._normalises = len(data.mean) > 0
        # A tensor without dimensions is applied to all pixels in half the time.
        shape = () if len(data.mean) == 1 else (-1, 1, 1)
        self._mean, self._std = (torch.tensor(values, device=device).view(shape) for values in (data.mean, data.std))

    def __call__(self, images: Tensor, uniforms: Tensor | None) -> Tensor:
        """Return model input [n, c, h, w] float for images [n, c, h, w], uint8 0..255 or float.

        `uniforms` [n, k] are the samples' random numbers for the augmentation, if any. `images` do not change.
        """
        layout = torch.contiguous_format  # decoders interleave the colours
        if images.dtype == torch.uint8:
            images = images.to(torch.float32, memory_format=layout).div_(255)
        else:
            images = images.clone(memory_format=layout)
        # In place from here: to allocate memory for a batch takes longer than the arithmetic.
        if self._size is not None and images.shape[-2:] != (self._size, self._size):
            images = F.interpolate(images, size=(self._size, self._size), mode="bilinear", antialias=True)
        if self.augment is not None and uniforms is not None:
            images = self.augment.apply(images, uniforms)
        if self._normalises:
            grey_as_colour = images.shape[1] < len(self._mean.flatten())  # three results for each value
            images = (images - self._mean if grey_as_colour else images.sub_(self._mean)).div_(self._std)
        if self._channels is not None:
            images = images.expand(-1, self._channels, -1, -1)
        if self._channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images


class Loader(ABC):
    """Loads the batches of a rank to its device, an epoch at a time."""

    num_samples: int

    @abstractmethod
    def example(self, size: int) -> Any:
        """Return a batch of `size` samples, the first two repeatedly."""

    @abstractmethod
    def read(self, epoch: int, wanted: Iterable[MicroBatch]) -> Iterator[Any]:
        """Yield what these micro-batches of an epoch hold. Raises UsageError if a sample cannot be used."""

    def load(self, epoch: int, work: Iterable[Batch]) -> Iterator[Batch]:
        """Yield these batches of an epoch with what they hold. Raises as `read` does."""
        ahead, work = itertools.tee(work)
        read = self.read(epoch, (micro for batch in ahead for micro in batch.micro_batches))
        for batch in work:
            micro_batches = tuple(MicroBatch(micro.number, micro.samples, next(read)) for micro in batch.micro_batches)
            yield Batch(batch.size, batch.num_micro_batches, micro_batches)

    def start(self) -> None:
        """Start the loader processes, so that the first batch is fast. Raises UsageError if that fails."""
        return

    def close(self) -> None:
        """End the loader processes, if there are any."""
        return


def open_loader(
    source: Source,
    prepare: Prepare | None,
    device: torch.device,
    seed: int,
    num_workers: int,
    collate: Collate = default_collate,
) -> Loader:
    """Return a loader, with `num_workers` loader processes unless the data are in memory.

    `prepare` is for images; without it, batches are what `collate` makes of items.
    """
    if isinstance(source, Arrays):
        assert prepare is not None
        return ArrayLoader(source, prepare, device, seed)
    return MapLoader(source, prepare, device, seed, 0 if isinstance(source, TensorDataset) else num_workers, collate)


class ArrayLoader(Loader):
    """Keeps a data set on the device and prepares whole batches."""

    def __init__(self, data: Arrays, prepare: Prepare, device: torch.device, seed: int) -> None:
        self.num_samples = len(data)
        self._data = Arrays(data.images.to(device), data.labels.to(device), len(data))
        self._prepare, self._device, self._seed = prepare, device, seed

    @override
    def read(self, epoch: int, wanted: Iterable[MicroBatch]) -> Iterator[Any]:
        wanted, augment = iter(wanted), self._prepare.augment
        while some := [micro.samples for micro in itertools.islice(wanted, _AT_ONCE)]:
            sizes, samples = [*map(len, some)], np.concatenate(some)
            rows = self._data.rows(torch.from_numpy(samples)).to(self._device)
            uniforms: Iterable[Tensor | None] = itertools.repeat(None)
            if augment is not None:
                numbers = order.uniforms(self._seed, epoch, samples, augment.num_uniforms)
                uniforms = torch.from_numpy(numbers).to(self._device).split_with_sizes(sizes)
            yield from map(self._batch, rows.split_with_sizes(sizes), uniforms)

    def _batch(self, rows: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        images, labels = self._data.images.index_select(0, rows), self._data.labels.index_select(0, rows)
        return self._prepare(images, uniforms), labels

    @override
    def example(self, size: int) -> tuple[Tensor, Tensor]:
        return self._batch(self._data.rows(torch.arange(size)).to(self._device), None)


@dataclass
class _Reader:
    """Reads micro-batches for DataLoader; random numbers depend on seed and sample alone."""

    data: MapDataset
    seed: int
    collate: Collate

    def __getitem__(self, samples: list[_Sample]) -> Any:
        """Return a batch, or a UsageError, which DataLoader would wrap in a traceback."""
        try:
            if self.collate is default_collate and type(self.data) is TensorDataset:  # which draws no random numbers
                rows = [index for _, index in samples]
                return [tensor[rows] for tensor in self.data.tensors]
            return self.batch_of([self.item(sample) for sample in samples])
        except UsageError as error:
            return error

    def item(self, sample: _Sample) -> Any:
        epoch, index = sample
        number = order.key(self.seed, epoch, _TRANSFORMS, index, 0)  # versions with repeated samples counted them here
        torch.default_generator.manual_seed(number)  # torch.manual_seed takes a hundred times as long
        random.seed(number)
        np.random.seed(number % 2**32)
        try:
            return self.data[index]
        except (UsageError, OSError):  # a file system may recover: the job resumes
            raise
        except Exception as error:  # the user's code may raise anything; a loader process loses its traceback
            _, place = in_user_code(error)
            reason = "".join(traceback.format_exception_only(error)).partition("\n")[0]
            raise UsageError(f"item {index} of the data raised {reason}{f' ({place})' if place else ''}") from error

    def batch_of(self, items: list[Any]) -> Any:
        try:
            return self.collate(items)
        except (RuntimeError, TypeError) as error:
            if self.collate is not default_collate:
                raise
            reason = "different sizes" if isinstance(error, RuntimeError) else str(error).partition("\n")[0]
            advice = "return tensors of one size and numbers, or give Task or Session a function of a list: collate=..."
            raise UsageError(f"items do not fit into a batch ({reason}): {advice}") from None


def _unchanged(batch: Any) -> Any:
    return batch


@dataclass
class _MicroBatchSampler:
    """Yields the samples of each micro-batch; the owner sets `epoch` and `micro_batches` before each iteration."""

    epoch: int = 0
    micro_batches: Iterable[MicroBatch] = ()

    def __iter__(self) -> Iterator[list[_Sample]]:
        for micro in self.micro_batches:
            yield [(self.epoch, number) for number in micro.samples.tolist()]


class MapLoader(Loader):
    """Reads items in loader processes, or in this process if there are none."""

    def __init__(
        self,
        data: MapDataset,
        prepare: Prepare | None,
        device: torch.device,
        seed: int,
        num_workers: int,
        collate: Collate = default_collate,
    ) -> None:
        self.num_samples = len(data)
        self._prepare, self._device, self._num_workers = prepare, device, num_workers
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sampler, self._reader = _MicroBatchSampler(), _Reader(data, seed, collate)
        # Forked processes crash after MPI or CUDA has started (Horovod issues #1215, #2898).
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # so that torch is imported once, not in each loader process
        self._loader: DataLoader[Any] = DataLoader(
            ByValue(self._reader) if num_workers > 0 else self._reader,  # type: ignore[arg-type]  # its items are batches
            batch_size=None,
            sampler=self._sampler,
            collate_fn=_unchanged,
            num_workers=num_workers,
            pin_memory=device.type == "cuda",
            persistent_workers=num_workers > 0,
            multiprocessing_context=context if num_workers > 0 else None,
        )

    @override
    def start(self) -> None:
        first = MicroBatch(0, np.zeros(1, dtype=np.int64))
        for _ in self._read(0, itertools.repeat(first, self._num_workers)):
            pass

    @override
    def read(self, epoch: int, wanted: Iterable[MicroBatch]) -> Iterator[Any]:
        return map(self._on_device, self._read(epoch, wanted))

    def _read(self, epoch: int, wanted: Iterable[MicroBatch]) -> Iterator[Any]:
        """Yield batches in host memory, or a UsageError. Raises UsageError if a loader process ended."""
        self._sampler.epoch, self._sampler.micro_batches = epoch, wanted
        # Terminals send these to all processes of a job. The training needs its loader processes until its commit.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        # Processes that start here must not import the user's script, which would begin to train there.
        script, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # the error below says it
                batches = iter(self._loader)
        except Exception as error:  # noqa: BLE001  # a data set may raise anything when it is pickled
            reason = str(error).partition("\n")[0]
            raise UsageError(f"loader processes cannot be sent the data set ({reason}); type --workers 0") from None
        finally:
            sys.modules["__main__"] = script
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        try:
            yield from batches
        except (RuntimeError, OSError, EOFError):
            processes = getattr(self._loader._iterator, "_workers", [])
            if connection.wait([process.sentinel for process in processes], timeout=1):
                advice = "a smaller --workers if memory or /dev/shm was full, else --workers 0 to see why"
                raise UsageError(f"a loader process was killed or has ended; type {advice}") from None
            raise

    @override
    def example(self, size: int) -> Any:
        items = [self._reader.item((0, number)) for number in range(min(2, self.num_samples))]
        return self._on_device(self._reader.batch_of([items[number % len(items)] for number in range(size)]))

    def _on_device(self, batch: Any) -> Any:
        if isinstance(batch, UsageError):
            raise batch
        with torch.cuda.stream(self._copies):  # on a GPU beside the backward pass that is queued
            batch = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)
        if self._prepare is not None:
            images, labels = batch
            batch = self._prepare(images, None), labels
        if self._copies is not None:
            # The next copy may take the memory of images, or of a batch whose passes are queued by now.
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
        return batch

    @override
    def close(self) -> None:
        del self._loader


class Ahead:
    """An iterator over batches that can prepare the next one during the reduction."""

    def __init__(self, batches: Iterator[Batch], mark: Callable[[str], None]) -> None:
        self._batches, self._mark = batches, mark
        self._next: Batch | Exception | None = None

    def prepare(self) -> None:
        """Make the next batch ready, once; keep an error until that batch is requested."""
        if self._next is not None:
            return
        try:
            self._next = next(self._batches)
        except Exception as error:  # noqa: BLE001  # a data set may raise anything; StopIteration ends the batches
            self._next = error
        self._mark("data")

    def __next__(self) -> Batch:
        self.prepare()
        batch, self._next = self._next, None
        if isinstance(batch, Exception):
            raise batch
        assert batch is not None
        return batch
