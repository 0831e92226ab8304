"""Batches of a data set that is read item by item, in loader processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, util
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from hvd_train.data import loader_process
from hvd_train.data.batches import Batch, Loader, MicroBatch
from hvd_train.data.dataset import MapDataset, Mark
from hvd_train.data.lent_memory import BATCHES_PER_PROCESS, Tasks
from hvd_train.data.loader_process import ReadBatch, TaskReader, Unreadable
from hvd_train.data.prepare import Prepare
from hvd_train.errors import UsageError
from hvd_train.progress.order import Assignment, Slot


class MapLoader(Loader):
    """Reads items in loader processes that start clean (forkserver), or in this process where there are none.

    Forked processes crash after MPI or CUDA has started (Horovod issues #1215, #2898).
    """

    def __init__(self, data: MapDataset, prepare: Prepare, device: torch.device, seed: int, num_workers: int) -> None:
        """Raises UsageError if there are to be loader processes, and the data set cannot be sent to them."""
        self.num_samples = len(data)
        self._prepare, self._device, self._num_workers = prepare, device, num_workers
        self._tasks, self._reader = Tasks(num_workers), TaskReader(data, seed)
        self._image_bytes = 0  # of one image; not known before `start`
        if num_workers > 0:
            _check_sendable(self._reader)
            _shorten_addresses()
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
        )

    @override
    def start(self) -> None:
        """Let each loader process read a sample."""
        first = Slot(0, np.zeros(1, dtype=np.int64))
        self._tasks.epoch, self._tasks.slots = 0, itertools.repeat(first, self._num_workers)
        for batch in self._batches():
            if not isinstance(batch, Unreadable) and torch.is_tensor(batch[0]):
                self._image_bytes = batch[0].nbytes

    @override
    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        ahead, work = itertools.tee(work)
        slots: Iterator[Slot] = (slot for assignment in ahead for slot in assignment.slots)
        first = next(slots, None)
        if first is not None:
            self._tasks.allocate((len(first.indices) + 1) * self._image_bytes)  # a remainder of one joins a slot
            slots = itertools.chain([first], slots)
        self._tasks.epoch, self._tasks.slots = epoch, slots
        batches = self._batches()
        for assignment in work:
            micro_batches = tuple(self._micro_batch(slot, next(batches)) for slot in assignment.slots)
            yield Batch(assignment.size, assignment.num_slots, micro_batches)

    def _batches(self) -> Iterator[Any]:
        try:
            with _only_here():
                batches = iter(self._loader)
            yield from batches
        except (RuntimeError, OSError, EOFError):
            processes = getattr(self._loader._iterator, "_workers", [])
            ended = connection.wait([process.sentinel for process in processes], timeout=1)
            for process in processes:
                if process.sentinel in ended:
                    code = process.exitcode or 0
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    advice = "a smaller --workers if memory or /dev/shm was full, else --workers 0 to see why"
                    raise UsageError(f"loader process {process.pid} {how}; type {advice}") from None
            raise

    def _micro_batch(self, slot: Slot, batch: ReadBatch | Unreadable) -> MicroBatch:
        if isinstance(batch, Unreadable):
            raise UsageError(batch.reason)
        self._reader.mark("collate")
        images, labels, buffer = batch
        images, labels = (part.to(self._device, non_blocking=True) for part in (images, labels))
        self._reader.mark("transfer")
        inputs = self._prepare(images, None, self._reader.mark)
        self._tasks.give_back(buffer)
        return MicroBatch(slot.number, inputs, labels, slot.indices)

    @override
    def watch(self, mark: Mark) -> None:
        """Call `mark` at the end of each stage; those of single images are seen without loader processes only."""
        self._reader.mark = mark

    @override
    def close(self) -> None:
        del self._loader


class _Nowhere:
    """Takes the place of a process that is being started, and drops what it is sent."""

    DupFd = duplicate_for_child = write = staticmethod(lambda sent: sent)


def _check_sendable(reader: TaskReader) -> None:
    """Raise UsageError if loader processes cannot be sent the data set: the one for validation starts late."""
    nowhere: Any = _Nowhere()
    set_spawning_popen(nowhere)
    try:
        ForkingPickler(nowhere).dump(reader)
    except Exception as error:  # noqa: BLE001  # a data set may raise anything
        reason = str(error).partition("\n")[0]
        raise UsageError(f"loader processes cannot be sent the data set ({reason}); type --workers 0") from None
    finally:
        set_spawning_popen(None)


def _shorten_addresses() -> None:
    """Have multiprocessing make its sockets in /tmp if the path of TMPDIR is too long for their addresses."""
    folder, before = tempfile.gettempdir(), tempfile.tempdir
    if len(os.fsencode(folder)) <= 75:  # bytes of 107; multiprocessing appends the other 32
        return
    try:
        tempfile.tempdir = "/tmp"  # noqa: S108  # only the name of a new folder begins with it
        util.get_temp_dir()  # multiprocessing keeps the new folder, and so do the processes that it starts
    except OSError:
        reason = "is too long for the sockets of loader processes, and /tmp cannot be written"
        raise UsageError(f"TMPDIR={folder} {reason}; export a shorter TMPDIR, or type --workers 0") from None
    finally:
        tempfile.tempdir = before


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
