"""Turn a rank's assignments into batches on its device, from memory or by loader processes."""

import itertools
import multiprocessing
import random
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from typing_extensions import override

from hvd_train.data.batches import Batch, Loader, MicroBatch
from hvd_train.data.dataset import Arrays, MapDataset, Mark, Source, Staged, unmarked
from hvd_train.data.prepare import Prepare
from hvd_train.errors import UsageError
from hvd_train.progress import order
from hvd_train.progress.order import Assignment, MicroBatchSamples

_STEPS_AT_ONCE = 64  # to look up the samples of one step alone takes as long as to fetch their images
_TRANSFORMS = 2  # in a key of random numbers: separates a sample's transforms from other uses of the seed


def open_loader(source: Source, prepare: Prepare, device: torch.device, seed: int, num_workers: int) -> Loader:
    """Return a loader, with `num_workers` loader processes unless the data are in memory."""
    if isinstance(source, Arrays):
        return ArrayLoader(source, prepare, device, seed)
    return MapLoader(source, prepare, device, seed, num_workers)


class ArrayLoader(Loader):
    """Keeps a data set on the device and prepares whole batches."""

    def __init__(self, data: Arrays, prepare: Prepare, device: torch.device, seed: int) -> None:
        self.num_samples = len(data)
        self._data = Arrays(data.images.to(device), data.labels.to(device), len(data))
        self._prepare, self._device, self._seed = prepare, device, seed
        self._mark: Mark = unmarked

    @override
    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        work = iter(work)
        while assignments := list(itertools.islice(work, _STEPS_AT_ONCE)):
            wanted = [micro for assignment in assignments for micro in assignment.micro_batches]
            prepared = map(self._micro_batch, wanted, *self._look_up(epoch, wanted))
            for assignment in assignments:
                micro_batches = tuple(itertools.islice(prepared, len(assignment.micro_batches)))
                yield Batch(assignment.size, assignment.num_micro_batches, micro_batches)

    def _look_up(self, epoch: int, wanted: list[MicroBatchSamples]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Return the rows of each micro-batch, and their random numbers [n, k] if they are augmented."""
        sizes = [len(micro.indices) for micro in wanted]
        indices = np.concatenate([np.empty(0, dtype=np.int64), *(micro.indices for micro in wanted)])
        rows = self._data.rows(torch.from_numpy(indices % self.num_samples)).to(self._device).split_with_sizes(sizes)
        if self._prepare.augment is None:
            return rows, [None] * len(wanted)
        numbers = order.uniforms(self._seed, epoch, indices, self._prepare.augment.num_uniforms)
        uniforms = torch.from_numpy(numbers).to(self._device).split_with_sizes(sizes)
        self._mark("augment")
        return rows, uniforms

    def _micro_batch(self, micro: MicroBatchSamples, rows: Tensor, uniforms: Tensor | None) -> MicroBatch:
        images, labels = self._data.images.index_select(0, rows), self._data.labels.index_select(0, rows)
        self._mark("read")
        return MicroBatch(micro.number, self._prepare(images, uniforms, self._mark), labels, micro.indices)

    @override
    def watch(self, mark: Mark) -> None:
        self._mark = mark


class Sample(NamedTuple):
    """One draw of a sample; each copy by repeated augmentation has its own random numbers."""

    epoch: int
    number: int
    copy: int


@dataclass(frozen=True)
class Unreadable:
    """An error as a value: DataLoader would wrap an exception in a traceback."""

    reason: str


@dataclass
class _Reader:
    """Reads items by `Sample` for DataLoader; random numbers depend on seed and sample alone."""

    data: MapDataset
    seed: int
    mark: Mark = unmarked

    def __getitem__(self, sample: Sample) -> tuple[Tensor, int] | Unreadable:
        number = order.key(self.seed, sample.epoch, _TRANSFORMS, sample.number, sample.copy)
        torch.default_generator.manual_seed(number)  # torch.manual_seed takes a hundred times as long
        random.seed(number)
        np.random.seed(number % 2**32)
        self.mark("random numbers")
        try:
            if isinstance(self.data, Staged):
                return self.data.staged_item(sample.number, self.mark)
            item = self.data[sample.number]
            self.mark("items")
            return item
        except UsageError as error:
            return Unreadable(str(error))


@dataclass
class _MicroBatchSampler:
    """Yields the samples of each micro-batch; the owner sets `epoch` and `micro_batches` before each iteration."""

    num_samples: int
    epoch: int = 0
    micro_batches: Iterable[MicroBatchSamples] = ()

    def __iter__(self) -> Iterator[list[Sample]]:
        for micro in self.micro_batches:
            copies, numbers = np.divmod(micro.indices, self.num_samples)
            yield [Sample(self.epoch, *of) for of in zip(numbers.tolist(), copies.tolist(), strict=True)]


class MapLoader(Loader):
    """Reads items in loader processes, or in this process if there are none."""

    def __init__(self, data: MapDataset, prepare: Prepare, device: torch.device, seed: int, num_workers: int) -> None:
        self.num_samples = len(data)
        self._prepare, self._device, self._num_workers = prepare, device, num_workers
        self._sampler, self._reader = _MicroBatchSampler(len(data)), _Reader(data, seed)
        # Forked processes crash after MPI or CUDA has started (Horovod issues #1215, #2898).
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # so that torch is imported once, not in each loader process
        self._loader: DataLoader[Any] = DataLoader(
            self._reader,  # type: ignore[arg-type]  # a data set whose keys are samples
            batch_sampler=self._sampler,
            collate_fn=_collate,
            num_workers=num_workers,
            pin_memory=device.type == "cuda",
            persistent_workers=num_workers > 0,
            multiprocessing_context=context if num_workers > 0 else None,
        )

    @override
    def start(self) -> None:
        """Let each loader process read a sample. Raises UsageError if the processes cannot be sent the data set."""
        first = MicroBatchSamples(0, np.zeros(1, dtype=np.int64))
        for _ in self._read(0, itertools.repeat(first, self._num_workers)):
            pass

    @override
    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        ahead, work = itertools.tee(work)
        batches = self._read(epoch, (micro for assignment in ahead for micro in assignment.micro_batches))
        for assignment in work:
            micro_batches = tuple(self._micro_batch(micro, next(batches)) for micro in assignment.micro_batches)
            yield Batch(assignment.size, assignment.num_micro_batches, micro_batches)

    def _read(self, epoch: int, wanted: Iterable[MicroBatchSamples]) -> Iterator[Any]:
        """Yield images and labels of each micro-batch, or Unreadable. Raises UsageError if a loader process ended."""
        self._sampler.epoch, self._sampler.micro_batches = epoch, wanted
        try:
            with _terminal_signals_blocked(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # the error below says it
                batches = iter(self._loader)
        except Exception as error:  # noqa: BLE001  # a data set may raise anything when it is pickled
            reason = str(error).partition("\n")[0]
            advice = "export a shorter TMPDIR" if "path too long" in reason else "type --workers 0"
            raise UsageError(f"loader processes cannot be sent the data set ({reason}); {advice}") from None
        try:
            yield from batches
        except (RuntimeError, OSError, EOFError):
            self._raise_for_ended_processes()
            raise

    def _raise_for_ended_processes(self) -> None:
        processes = getattr(self._loader._iterator, "_workers", [])
        ended = connection.wait([process.sentinel for process in processes], timeout=1)
        for process in processes:
            if process.sentinel in ended:
                code = process.exitcode or 0
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                advice = "a smaller --workers if memory or /dev/shm was full, else --workers 0 to see why"
                raise UsageError(f"loader process {process.pid} {how}; type {advice}") from None

    def _micro_batch(self, micro: MicroBatchSamples, batch: list[Tensor] | Unreadable) -> MicroBatch:
        if isinstance(batch, Unreadable):
            raise UsageError(batch.reason)
        self._reader.mark("collate")
        images, labels = (part.to(self._device, non_blocking=True) for part in batch)
        self._reader.mark("transfer")
        return MicroBatch(micro.number, self._prepare(images, None, self._reader.mark), labels, micro.indices)

    @override
    def watch(self, mark: Mark) -> None:
        """Call `mark` at the end of each stage in this process."""
        self._reader.mark = mark

    @override
    def close(self) -> None:
        del self._loader


def _collate(items: list[tuple[Tensor, int] | Unreadable]) -> list[Tensor] | Unreadable:
    errors = [item for item in items if isinstance(item, Unreadable)]
    try:
        return errors[0] if errors else default_collate(items)
    except RuntimeError as error:
        return Unreadable(f"the items of a batch do not fit together: {str(error).splitlines()[0]}")


@contextmanager
def _terminal_signals_blocked() -> Iterator[None]:
    # Terminals send them to all processes of a job. The training needs its loader processes until its commit.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
