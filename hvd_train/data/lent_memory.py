"""Shared memory that is lent to loader processes: they fill it with a batch and get it again with a later task.

DataLoader itself allocates shared memory for each batch anew. The kernel then clears it, which takes a twelfth of the
time of a process that reads JPEG files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_train.progress.order import Slot

BATCHES_PER_PROCESS = 2  # that each loader process has ready or in hand


@dataclass(frozen=True)
class Task:
    """What a loader process needs to read one slot: its samples and, if one is free, a buffer to put the images into.

    `samples` are pairs (epoch, sample number), `buffer` is the number of a buffer. `buffers` is set in the first task
    that a process gets after buffers were allocated, and holds all of them by number; the process keeps them.
    """

    samples: list[tuple[int, int]]
    buffer: int | None
    buffers: dict[int, Tensor] | None


class Tasks:
    """Iterates over the tasks for the slots of an epoch, in their order; DataLoader takes it as its sampler.

    Each task borrows a buffer. It belongs to that task alone until `give_back` is called: when its batch has been
    prepared on a CPU or, for a GPU, is in pinned memory. There is a buffer for each batch that loader processes have in
    hand, and one for the batch in use here.
    """

    def __init__(self, num_workers: int) -> None:
        """The owner sets `epoch` and `slots` before each iteration."""
        self.epoch = 0
        self.slots: Iterable[Slot] = ()
        self._num_workers = num_workers
        self._buffers: dict[int, Tensor] = {}
        self._free: list[int] = []
        self._are_sent = True

    def allocate(self, nbytes: int) -> None:
        """Allocate buffers of `nbytes` each for loader processes, unless there are some of at least that size."""
        if self._num_workers == 0 or nbytes <= (self._buffers[0].numel() if self._buffers else 0):
            return
        # As in default_collate, nothing touches the memory here: where /dev/shm is too small, that would end the
        # training by a signal without a message, while DataLoader reports the end of a loader process.
        count = BATCHES_PER_PROCESS * self._num_workers + 1
        storages = [torch.UntypedStorage._new_shared(nbytes) for _ in range(count)]  # type: ignore[no-untyped-call]
        self._buffers = {n: torch.empty(0, dtype=torch.uint8).set_(storage) for n, storage in enumerate(storages)}
        self._are_sent = False

    def give_back(self, buffer: int | None) -> None:
        """Let a later task borrow this buffer, since nobody looks at its content any more; None is ignored."""
        if buffer is not None:
            self._free.append(buffer)

    def __iter__(self) -> Iterator[Task]:
        self._free = [*self._buffers]  # DataLoader begins an epoch when all processes are idle
        for number, slot in enumerate(self.slots):
            samples = [(self.epoch, int(index)) for index in slot.indices]
            buffer = self._free.pop() if self._free else None
            yield Task(samples, buffer, None if self._are_sent else self._buffers)
            # DataLoader gives the first tasks of an epoch to one process each.
            self._are_sent = self._are_sent or number + 1 >= self._num_workers
