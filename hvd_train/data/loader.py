"""Turn a rank's assignments into batches on its device, from memory or by loader processes."""

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from typing_extensions import override

from hvd_train.data.by_value import ByValue, digest_of_pickle
from hvd_train.data.dataset import Arrays, Augment, DataSet, MapDataset, Source
from hvd_train.data.identity import SEEDED, digest_of_items
from hvd_train.data.random_numbers import seed_on_cpu, unchanged_numbers
from hvd_train.data.sources import follows_epochs, inner_sets
from hvd_train.data.trees import map_tensors
from hvd_train.errors import HvdTrainError, UsageError, first_line, place_in_user_code
from hvd_train.launch import cause
from hvd_train.progress import order
from hvd_train.progress.order import Batch, Indices, MicroBatch
from hvd_train.progress.stop import reading

# Python's tracker of resources gets the options; it frees the semaphores of a rank that is killed
_NO_TRACKER_LINES = "ignore:resource_tracker:UserWarning"
_STARTING = threading.Lock()  # held while a loader takes the place of the program's script
# micro-batches: to look up the samples of one alone takes as long as to fetch their images
_AT_ONCE = 256
_END = object()  # of the batches
_MOST_PREPARED = 1 << 24  # values of a set that is prepared once, as a whole; 64 MB as float32
_PREFETCH = 2  # micro-batches of each loader process
# in a key of random numbers: separates a sample's transforms from other uses of the seed
_TRANSFORMS = 2
# an epoch, the samples of a micro-batch, and what their random numbers belong to
_Wanted = tuple[int, list[int], list[int]]
Collate = Callable[[list[Any]], Any]  # makes a batch of items
Check = Callable[[Any, Indices], None]  # raises UsageError for a batch of these samples


class Prepare:
    """Scales, resizes, augments and normalises whole batches of images, and
    repeats grey as three channels.
    """

    def __init__(
        self,
        data: DataSet,
        device: torch.device,
        *,
        image_size: int | None,
        augment: Augment | None,
        colour: bool,
        channels_last: bool = False,
        in_one_pass: bool = False,
    ) -> None:
        """`image_size` (pixels; None: as stored) is the side of the result;
        `colour` asks for three channels.

        `in_one_pass` reads and writes memory once, for uint8 images that are only scaled and
        normalised. Its results are rounded in another way.
        """
        self.augment = augment
        self._size = image_size
        self._channels_last = channels_last
        self._channels = 3 if colour and data.channels == 1 else None
        self._normalises = len(data.mean) > 0
        # A tensor without dimensions is applied to all pixels in half the time.
        shape = () if len(data.mean) == 1 else (-1, 1, 1)
        self._mean, self._std = (
            torch.tensor(values, device=device).view(shape) for values in (data.mean, data.std)
        )
        self._in_one_pass = in_one_pass
        mean, std = (
            torch.tensor(values or otherwise, dtype=torch.float64).view(-1, 1, 1)
            for values, otherwise in ((data.mean, (0.0,)), (data.std, (1.0,)))
        )
        self._factor = (1 / (255 * std)).float().to(device)
        self._shift = (-mean / std).float().to(device)

    def __call__(self, images: Tensor, uniforms: Tensor | None) -> Tensor:
        """Return model input [n, c, h, w] float for images [n, c, h, w], uint8 0..255 or float.

        `uniforms` [n, k] are the samples' random numbers for the augmentation, if any. `images` do
        not change.
        """
        size = None if images.shape[-2:] == (self._size, self._size) else self._size
        augment = None if uniforms is None else self.augment
        is_moved = size is not None or augment is not None
        if self._in_one_pass and images.dtype == torch.uint8 and not is_moved:
            return self._scaled_and_normalised(images)
        of_result = torch.channels_last if self._channels_last else torch.contiguous_format
        # decoders interleave the colours
        layout = torch.contiguous_format if is_moved else of_result
        if images.dtype == torch.uint8:
            images = images.to(torch.float32, memory_format=layout).div_(255)
        else:
            images = images.clone(memory_format=layout)
        # In place from here: to allocate memory for a batch takes longer than the arithmetic.
        if size is not None:
            images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
        if augment is not None and uniforms is not None:
            images = augment.apply(images, uniforms)
        if self._normalises:
            # three results for each value
            grey_as_colour = images.shape[1] < len(self._mean.flatten())
            images = (images - self._mean if grey_as_colour else images.sub_(self._mean)).div_(
                self._std
            )
        if self._channels is not None:
            images = images.expand(-1, self._channels, -1, -1)
        return images.contiguous(memory_format=of_result) if self._channels_last else images

    def _scaled_and_normalised(self, images: Tensor) -> Tensor:
        channels = max(images.shape[1], len(self._shift), self._channels or 1)
        images = images.expand(-1, channels, -1, -1)
        result = torch.empty(
            images.shape,
            device=images.device,
            memory_format=torch.channels_last if self._channels_last else torch.contiguous_format,
        )
        return torch.addcmul(self._shift, images, self._factor, out=result)


class Loader(ABC):
    """Loads the batches of a rank to its device, an epoch at a time."""

    num_samples: int
    read_ahead = 0
    """The most micro-batches that loader processes read ahead."""

    @abstractmethod
    def example(self, size: int) -> Any:
        """Return a batch of `size` samples, the first two repeatedly."""

    @abstractmethod
    def read(self, epoch: int, wanted: Iterable[MicroBatch]) -> Iterator[Any]:
        """Yield what these micro-batches of an epoch hold.

        Raises: UsageError: if a sample cannot be used; DataTimeout.
        """

    def load(self, epoch: int, work: Iterable[Batch]) -> Iterator[Batch]:
        """Yield these batches of an epoch with what they hold. Raises as `read` does."""
        ahead, work = itertools.tee(work)
        read = self.read(epoch, (micro for batch in ahead for micro in batch.passes))
        for batch in work:
            passes = [
                MicroBatch(micro.number, micro.samples, next(read), micro.positions)
                for micro in batch.passes
            ]
            rechecked = None if batch.rechecked is None else passes.pop(0)
            yield Batch(
                batch.size, batch.num_micro_batches, tuple(passes), batch.is_rechecked, rechecked
            )

    def start(self) -> str:
        """Start the loader processes, and return the digest of the items that they read.

        Raises UsageError.
        """
        return self.digest()

    @abstractmethod
    def digest(self) -> str:
        """Return a digest of the first, middle and last item, read by this process.

        Raises UsageError.
        """

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
    check: Check | None = None,
) -> Loader:
    """Return a loader, with `num_workers` loader processes unless the data are in memory.

    `prepare` is for images; without it, batches are what `collate` makes of items, and `check`
    looks at them.
    """
    if isinstance(source, Arrays):
        assert prepare is not None
        return ArrayLoader(source, prepare, device, seed)
    processes = 0 if isinstance(source, TensorDataset) else num_workers
    return MapLoader(source, prepare, device, seed, processes, collate, check)


class ArrayLoader(Loader):
    """Keeps a data set on the device and prepares whole batches."""

    def __init__(self, data: Arrays, prepare: Prepare, device: torch.device, seed: int) -> None:
        self.num_samples = len(data)
        self._data = Arrays(data.images.to(device), data.labels.to(device), len(data))
        self._prepare = prepare
        self._device = device
        self._seed = seed
        self._prepared = self._prepared_once()

    def _prepared_once(self) -> Tensor | None:
        """Return the model input of a small set without augmentation, in the order of its rows."""
        images = self._data.images
        if self._prepare.augment is not None:
            return None
        one = self._prepare(images[:1], None)
        # `index_select` does not keep other memory formats
        if len(images) * one.numel() > _MOST_PREPARED or not one.is_contiguous():
            return None
        return self._prepare(images, None)

    @override
    def read(self, epoch: int, wanted: Iterable[MicroBatch]) -> Iterator[Any]:
        wanted = iter(wanted)
        augment = self._prepare.augment
        while some := [*itertools.islice(wanted, _AT_ONCE)]:
            sizes = [len(micro.samples) for micro in some]
            samples = np.concatenate([micro.samples for micro in some])
            rows = self._data.rows(torch.from_numpy(samples)).to(self._device)
            uniforms: Iterable[Tensor | None] = itertools.repeat(None)
            if augment is not None:
                seeds = np.concatenate([micro.seeds for micro in some])
                numbers = order.uniforms(self._seed, epoch, seeds, augment.num_uniforms)
                uniforms = torch.from_numpy(numbers).to(self._device).split_with_sizes(sizes)
            yield from map(self._batch, rows.split_with_sizes(sizes), uniforms)

    def _batch(self, rows: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        labels = self._data.labels.index_select(0, rows)
        if self._prepared is not None:
            return self._prepared.index_select(0, rows), labels
        return self._prepare(self._data.images.index_select(0, rows), uniforms), labels

    @override
    def example(self, size: int) -> tuple[Tensor, Tensor]:
        return self._batch(self._data.rows(torch.arange(size)).to(self._device), None)

    @override
    def digest(self) -> str:
        return digest_of_items([self._data[number] for number in _a_few(self.num_samples)])


def _a_few(num_samples: int) -> list[int]:
    return [*dict.fromkeys((0, num_samples // 2, num_samples - 1))]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Raise UsageError for an error in the user's code, which may be any: a loader
    process loses its traceback.
    """
    try:
        yield
    except (HvdTrainError, OSError):  # a file system may recover: the job resumes
        raise
    except Exception as error:
        reason = first_line("".join(traceback.format_exception_only(error)))
        raise UsageError(
            f"{what} of the data raised {reason}{place_in_user_code(error)}"
        ) from error


@dataclass
class _Reader:
    """Reads micro-batches for DataLoader; random numbers depend on seed and sample alone."""

    data: MapDataset
    seed: int
    collate: Collate
    epoch: int | None = None  # the one that the data set has begun

    def __getitem__(self, wanted: _Wanted) -> Any:
        """Return a batch, or an error of ours, which DataLoader would wrap in a
        traceback; of no samples, a digest.
        """
        epoch, samples, seeds = wanted
        try:
            if not samples:
                return self.digest()
            # which draws no random numbers
            if self.collate is default_collate and type(self.data) is TensorDataset:
                return [tensor[samples] for tensor in self.data.tensors]
            places = zip(samples, seeds, strict=True)
            return self.batch_of([self.item(epoch, index, seed) for index, seed in places])
        except HvdTrainError as error:
            return error

    def item(self, epoch: int, index: int, seed: int) -> Any:
        """Return an item, whose random numbers belong to `seed`."""
        self.begin(epoch)
        # versions with repeated samples counted here
        seed_on_cpu(order.key(self.seed, epoch, _TRANSFORMS, seed, 0))
        with _named(f"item {index}"):
            return self.data[index]

    def begin(self, epoch: int) -> None:
        """Tell the data set of an epoch before its first item."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        with unchanged_numbers(), _named(f"begin_epoch({epoch})"):
            for each in follows_epochs(self.data):
                seed_on_cpu(order.key(self.seed, epoch, _TRANSFORMS))
                each.begin_epoch(epoch)

    def digest(self) -> str:
        """Return a digest of a few items.

        Raises UsageError if they are others when they are read again.
        """
        if hasattr(self.data, "content_of_files"):  # by which it is known already
            self.item(0, 0, 0)
            return ""
        numbers = _a_few(len(self.data))
        first, second = (
            digest_of_items([self.item(0, number, number) for number in numbers]) for _ in range(2)
        )
        if first != second:
            raise UsageError(
                f"items of {type(self.data).__name__} differ when they are read again, so no run "
                "could be repeated: draw random numbers in __getitem__ from torch, numpy or "
                "random, which are seeded for each item, or from a generator that is made there "
                "with the seed torch.initial_seed()"
            )
        return first

    def batch_of(self, items: list[Any]) -> Any:
        try:
            return self.collate(items)
        except (RuntimeError, TypeError) as error:
            if self.collate is not default_collate:
                raise
            reason = "different sizes" if isinstance(error, RuntimeError) else first_line(error)
            advice = (
                "return tensors of one size and numbers, or give Task or Session a function "
                "of a list: collate=..."
            )
            raise UsageError(f"items do not fit into a batch ({reason}): {advice}") from None


def _unchanged(batch: Any) -> Any:
    return batch


@dataclass
class _MicroBatchSampler:
    """Yields the samples of each micro-batch; the owner sets `epoch` and
    `micro_batches` before each iteration.
    """

    epoch: int = 0
    micro_batches: Iterable[MicroBatch] = ()

    def __iter__(self) -> Iterator[_Wanted]:
        for micro in self.micro_batches:
            yield self.epoch, micro.samples.tolist(), micro.seeds.tolist()


class _Version:
    """A version of a data set, by which later changes are found."""

    def __init__(self, data: MapDataset) -> None:
        self._digest = digest_of_pickle(data)
        self.values = _plain_values(data)

    def is_old(self, data: MapDataset) -> bool:
        """Return whether the data set has changed since."""
        digest = digest_of_pickle(data)
        is_same = digest is None or self._digest in (None, digest)
        return not is_same or self.values != _plain_values(data)

    def check(self, data: MapDataset) -> None:
        """Raise UsageError if a plain value has changed since."""
        for (_, name), _ in self.values.items() ^ _plain_values(data).items():
            raise UsageError(
                f"{name} of the data was changed while loader processes read an epoch, "
                "which do not see it: change it before the steps of an epoch, or in "
                "begin_epoch(epoch), or type --workers 0"
            )


def _plain_values(data: MapDataset) -> dict[tuple[int, str], Any]:
    """Return the attributes of a data set that take no time to compare; of tensors,
    how often they were written.
    """
    return {
        (number, f"{type(each).__name__}.{name}"): getattr(value, "_version", value)
        for number, each in enumerate(inner_sets(data))
        for name, value in getattr(each, "__dict__", {}).items()
        if isinstance(value, (bool, int, float, str, Tensor))
    }


@contextmanager
def _without_script() -> Iterator[None]:
    """Start processes that do not import the user's script, which would begin to train there.

    Terminals send SIGINT and SIGHUP to all processes of a job. The training needs its loader
    processes until its commit, so these block both.
    """
    with _STARTING:
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _begin_process(_number: int) -> None:
    """Let a loader process show where C code crashes, and end with its rank.

    Its fork server, which is its parent in /proc, outlives a rank that is killed.
    """
    cause.show_native_crashes()  # after DataLoader's handlers, which print no place
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    if rank := multiprocessing.parent_process():
        rank.join()
        os._exit(1)


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
        check: Check | None = None,
    ) -> None:
        self.num_samples = len(data)
        self._check = check
        self._prepare = prepare
        self._device = device
        self._num_workers = num_workers
        self.read_ahead = _PREFETCH * num_workers
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sampler = _MicroBatchSampler()
        self._reader = _Reader(data, seed, collate)
        self._loader = self._new_loader()
        self._sent: _Version | None = None  # the version of the data set that loader processes have

    def _new_loader(self) -> DataLoader[Any]:
        items: Any = self._reader  # its items are batches
        of_processes: dict[str, Any] = {}
        if self._num_workers > 0:
            # Forked processes crash after MPI or CUDA has started (Horovod issues #1215, #2898).
            context = multiprocessing.get_context("forkserver")
            # so that torch is imported once, not in each loader process
            context.set_forkserver_preload([__name__])
            if _NO_TRACKER_LINES not in sys.warnoptions:
                sys.warnoptions.append(_NO_TRACKER_LINES)
            items = ByValue(self._reader, self._reader.seed)
            of_processes = {
                "num_workers": self._num_workers,
                "prefetch_factor": _PREFETCH,
                "worker_init_fn": _begin_process,
                "persistent_workers": True,
                "multiprocessing_context": context,
            }
        return DataLoader(
            items,
            batch_size=None,
            sampler=self._sampler,
            collate_fn=_unchanged,
            pin_memory=self._device.type == "cuda",
            **of_processes,
        )

    @override
    def start(self) -> str:
        request = MicroBatch(0, np.zeros(0, dtype=np.int64))
        digests = {*self._read(0, itertools.repeat(request, self._num_workers))}
        if len(digests) > 1:
            raise UsageError(f"loader processes read different items: {SEEDED}")
        return digests.pop() if digests else self.digest()

    @override
    def digest(self) -> str:
        with unchanged_numbers():
            return self._reader.digest()

    @override
    def read(self, epoch: int, wanted: Iterable[MicroBatch]) -> Iterator[Any]:
        data = self._reader.data
        if len(data) != self.num_samples:
            raise UsageError(
                f"the data set had {self.num_samples} samples, and has {len(data)} "
                "now: keep its length"
            )
        # Loader processes with an older version end, and others start with this one.
        if self._sent is not None and self._sent.is_old(data):
            self._sent = None
            self._loader = self._new_loader()
        # What `begin_epoch` changes here is no change: loader processes call it, too.
        self._reader.begin(epoch)
        if self._sent is not None and follows_epochs(data):
            self._sent = _Version(data)
        return self._on_device(epoch, wanted)

    def _on_device(self, epoch: int, wanted: Iterable[MicroBatch]) -> Iterator[Any]:
        to_read, to_check = itertools.tee(wanted)
        for batch, micro in zip(self._read(epoch, to_read), to_check, strict=False):
            if self._check is not None:
                self._check(batch, micro.samples)
            yield self._moved(batch)

    def _read(self, epoch: int, wanted: Iterable[MicroBatch]) -> Iterator[Any]:
        """Yield batches in host memory.

        Raises: UsageError: if an item cannot be used, or a loader process ended; DataTimeout.
        """
        self._sampler.epoch = epoch
        self._sampler.micro_batches = wanted
        batches = self._started()
        if self._num_workers > 0 and self._sent is None:
            self._sent = _Version(self._reader.data)
        try:
            while True:
                with reading:
                    batch = next(batches, _END)
                if batch is _END:
                    return
                if self._sent is not None:
                    self._sent.check(self._reader.data)
                if isinstance(batch, HvdTrainError):
                    raise batch
                yield batch
        except (RuntimeError, OSError, EOFError):
            processes = getattr(self._loader._iterator, "_workers", [])
            if connection.wait([process.sentinel for process in processes], timeout=1):
                codes = [process.exitcode for process in processes if process.exitcode]
                ended = cause.in_words(codes[0]) if codes else "has ended"
                why = "; ".join(filter(None, [ended, cause.killed_for_memory()]))
                advice = (
                    "a smaller --workers if memory or /dev/shm was full, else "
                    "--workers 0 to see why"
                )
                raise UsageError(f"a loader process {why}; type {advice}") from None
            raise

    def _started(self) -> Iterator[Any]:
        """Start an epoch of the loader, and its processes if there are none yet."""
        try:
            with _without_script(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # the error below says it
                return iter(self._loader)
        except Exception as error:  # noqa: BLE001
            # a data set may raise anything when it is pickled
            reason = first_line(error)
            raise UsageError(
                f"loader processes cannot be sent the data set ({reason}); type --workers 0"
            ) from None

    @override
    def example(self, size: int) -> Any:
        epoch = self._reader.epoch or 0
        few = range(min(2, self.num_samples))
        items = [self._reader.item(epoch, number, number) for number in few]
        if self._sent is not None:
            # items may count their reads, for instance
            self._sent.values = _plain_values(self._reader.data)
        return self._moved(
            self._reader.batch_of([items[number % len(items)] for number in range(size)])
        )

    def _moved(self, batch: Any) -> Any:
        with torch.cuda.stream(self._copies):  # on a GPU beside the backward pass that is queued
            batch = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)
        if self._prepare is not None:
            images, labels = batch
            batch = self._prepare(images, None), labels
        if self._copies is not None:
            # The next copy may take the memory of images, or of a batch whose passes are queued by
            # now.
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
        return batch

    @override
    def close(self) -> None:
        del self._loader


class Ahead:
    """An iterator over batches that can prepare the next one during the reduction."""

    def __init__(self, batches: Iterator[Batch], mark: Callable[[str], None]) -> None:
        self._batches = batches
        self._mark = mark
        self._next: Batch | BaseException | None = None

    def prepare(self) -> None:
        """Make the next batch ready, once; keep an error until that batch is requested."""
        if self._next is not None:
            return
        try:
            self._next = next(self._batches)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            # a data set may raise anything; StopIteration ends the batches, and SystemExit the wait
            self._next = error
        self._mark("data")

    def __next__(self) -> Batch:
        self.prepare()
        batch = self._next
        self._next = None
        if isinstance(batch, BaseException):
            raise batch
        assert batch is not None
        return batch
