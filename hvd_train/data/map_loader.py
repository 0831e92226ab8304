"""Batches of a data set that is read item by item, in loader processes."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from hvd_train.data import loader_process
from hvd_train.data.batches import Batch, Loader, MicroBatch, OneAhead
from hvd_train.data.coded import CodedBatch
from hvd_train.data.copies import Copies
from hvd_train.data.dataset import MapDataset, Mark
from hvd_train.data.lent_memory import BATCHES_PER_PROCESS, Tasks
from hvd_train.data.loader_process import Collate, ReadBatch, TaskReader, Unreadable
from hvd_train.data.prepare import Preparation
from hvd_train.data.trees import Tree, mapped, unpacked
from hvd_train.errors import UsageError
from hvd_train.launch import stacks
from hvd_train.progress.order import Assignment, Slot


@dataclass(frozen=True)
class _Read:
    """A slot whose samples have been read: inputs or what a GPU decodes, targets, and lent memory."""

    slot: Slot
    inputs: Tree | CodedBatch
    targets: Tree
    buffer: int | None


class MapLoader(Loader):
    """Reads items in loader processes that start clean (forkserver), or in this process where there are none.

    Forked processes crash after MPI or CUDA has started (Horovod issues #1215, #2898).
    """

    def __init__(
        self,
        data: MapDataset,
        prepare: Preparation,
        device: torch.device,
        seed: int,
        num_workers: int,
        collate: Collate | None = None,
    ) -> None:
        """`collate` makes a batch of items, where that is not to stack them."""
        self.num_samples = len(data)
        self._prepare, self._num_workers = prepare, num_workers
        self._copies = Copies(device) if device.type == "cuda" else None
        self._tasks, self._reader = Tasks(num_workers), TaskReader(data, seed, collate)
        self._input_bytes = 0  # of one sample; not known before `start`
        context = multiprocessing.get_context("forkserver")
        # The server imports torch once, instead of each loader process.
        context.set_forkserver_preload([loader_process.__name__])
        self._loader: DataLoader[Any] = DataLoader(
            self._reader,  # type: ignore[arg-type]  # a map-style data set of whole batches, whose keys are tasks
            batch_size=None,
            sampler=self._tasks,
            num_workers=num_workers,
            prefetch_factor=BATCHES_PER_PROCESS if num_workers > 0 else None,
            pin_memory=device.type == "cuda",
            persistent_workers=num_workers > 0,
            multiprocessing_context=context if num_workers > 0 else None,
            worker_init_fn=stacks.answer_stacks,
        )

    @override
    def start(self) -> None:
        """Let each loader process read a sample."""
        first = Slot(0, np.zeros(1, dtype=np.int64))
        self._tasks.epoch, self._tasks.slots = 0, itertools.repeat(first, self._num_workers)
        for batch in self._batches():
            if not isinstance(batch, Unreadable):
                self._input_bytes = batch[0].nbytes

    @override
    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        ahead, work = itertools.tee(work)
        slots: Iterator[Slot] = (slot for assignment in ahead for slot in assignment.slots)
        first = next(slots, None)
        if first is not None:
            self._tasks.allocate(len(first.indices) * self._input_bytes)
            slots = itertools.chain([first], slots)
        self._tasks.epoch, self._tasks.slots = epoch, slots
        batches = self._batches()
        for assignment in work:
            read = (self._read(slot, next(batches)) for slot in assignment.slots)
            yield Batch(assignment.size, assignment.num_slots, assignment.own_sizes, self._micro_batches(read))

    def _batches(self) -> Iterator[Any]:
        with _only_here():
            return iter(self._loader)

    def _read(self, slot: Slot, batch: ReadBatch | Unreadable) -> _Read:
        if isinstance(batch, Unreadable):
            raise UsageError(batch.reason)
        self._reader.mark("collate")
        inputs, targets, buffer = batch
        return _Read(slot, inputs if isinstance(inputs, CodedBatch) else unpacked(inputs), unpacked(targets), buffer)

    def _micro_batches(self, read: Iterator[_Read]) -> Iterable[MicroBatch]:
        """Return the micro-batches of a step, all of whose samples are read by then; a GPU gets them one by one."""
        copies = self._copies
        if copies is None:
            return tuple(self._prepared_here(one) for one in read)

        def begin(one: _Read) -> tuple[Slot, Tree, Tree]:
            inputs, targets = copies.begin(one.inputs, one.targets)
            self._reader.mark("transfer")
            return one.slot, inputs, targets

        def finish(copied: tuple[Slot, Tree, Tree]) -> MicroBatch:
            slot, inputs, targets = copied
            with copies.use():
                return self._micro_batch(slot, inputs, mapped(Tensor.clone, targets))

        return OneAhead(map(begin, [self._pinned(one) for one in read]), finish)

    def _prepared_here(self, read: _Read) -> MicroBatch:
        assert not isinstance(read.inputs, CodedBatch)  # files are for GPUs
        micro = self._micro_batch(read.slot, read.inputs, read.targets)
        self._tasks.give_back(read.buffer)
        return micro

    def _micro_batch(self, slot: Slot, inputs: Tree, targets: Tree) -> MicroBatch:
        return MicroBatch(slot.number, self._prepare(inputs, None, self._reader.mark), targets, slot.indices)

    def _pinned(self, read: _Read) -> _Read:
        """Give lent memory back early: DataLoader has copied what was in it into pinned memory."""
        self._tasks.give_back(read.buffer)
        return read

    @override
    def watch(self, mark: Mark) -> None:
        """Call `mark` at the end of each stage; those of single images are seen without loader processes only."""
        self._reader.mark = mark

    @override
    def close(self) -> None:
        del self._loader


@contextmanager
def _only_here() -> Iterator[None]:
    """Keep Ctrl-C and the end of a terminal from processes that are started inside the block.

    Terminals send these to all processes of a job. The one that trains still needs the others to come to its commit.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
