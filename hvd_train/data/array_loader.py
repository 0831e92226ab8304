"""Batches of a data set in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hvd_train.data.batches import Batch, Loader, MicroBatch, OneAhead
from hvd_train.data.dataset import Arrays, Mark, unmarked
from hvd_train.data.prepare import Preparation
from hvd_train.data.trees import Tree, leaves, mapped
from hvd_train.progress import order
from hvd_train.progress.order import Assignment, Slot

_STEPS_AT_ONCE = 64  # to look up the samples of one step alone takes as long as to fetch their images
_MAX_PREPARED_BYTES = 1 << 26  # that a data set may take a second time, as model input


class ArrayLoader(Loader):
    """Keeps a data set on the device: a batch is one index and a few operations on the whole batch.

    A small data set without random augmentation is prepared once, instead of batch by batch.
    """

    def __init__(self, data: Arrays, prepare: Preparation, device: torch.device, seed: int) -> None:
        self.num_samples = len(data)
        self._rows = data.rows
        self._inputs, self._targets = (mapped(lambda t: t.to(device), tree) for tree in (data.inputs, data.targets))
        self._prepare, self._device, self._seed = prepare, device, seed
        self._mark: Mark = unmarked
        self._is_prepared = prepare.augment is None and _prepared_bytes(prepare, self._inputs) <= _MAX_PREPARED_BYTES
        if self._is_prepared:
            self._inputs = mapped(torch.Tensor.contiguous, prepare(self._inputs, None))

    @override
    def start(self) -> None:
        """Do nothing: the data are on the device already."""

    @override
    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        work = iter(work)
        while assignments := list(itertools.islice(work, _STEPS_AT_ONCE)):
            slots = [slot for assignment in assignments for slot in assignment.slots]
            found = zip(slots, *self._look_up(epoch, slots), strict=True)
            for assignment in assignments:
                mine = list(itertools.islice(found, len(assignment.slots)))
                micro_batches = OneAhead(itertools.starmap(self._micro_batch, mine), lambda micro: micro)
                yield Batch(assignment.size, assignment.num_slots, assignment.own_sizes, micro_batches)

    def _look_up(self, epoch: int, slots: list[Slot]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Return for each slot the rows of its samples, and their random numbers [n, k] if they are augmented."""
        sizes = [len(slot.indices) for slot in slots]
        samples = np.concatenate([np.empty(0, dtype=np.int64), *(slot.indices for slot in slots)])
        rows = torch.from_numpy(samples % self._rows).to(self._device).split_with_sizes(sizes)
        if self._prepare.augment is None:
            return rows, [None] * len(slots)
        numbers = order.uniforms(self._seed, epoch, samples, self._prepare.augment.num_uniforms)
        uniforms = torch.from_numpy(numbers).to(self._device).split_with_sizes(sizes)
        self._mark("augment")
        return rows, uniforms

    def _micro_batch(self, slot: Slot, rows: Tensor, uniforms: Tensor | None) -> MicroBatch:
        inputs, targets = (mapped(lambda t: t.index_select(0, rows), tree) for tree in (self._inputs, self._targets))
        self._mark("read")
        if self._is_prepared:
            inputs = self._prepare.lay_out(inputs)
            self._mark("prepare")
        else:
            inputs = self._prepare(inputs, uniforms, self._mark, overwrite=True)
        return MicroBatch(slot.number, inputs, targets, slot.indices)

    @override
    def watch(self, mark: Mark) -> None:
        self._mark = mark

    @override
    def close(self) -> None:
        """Do nothing: there are no loader processes."""


def _prepared_bytes(prepare: Preparation, inputs: Tree) -> int:
    """Return the number of bytes that all rows take as model input."""
    first = prepare(mapped(lambda tensor: tensor[:1], inputs), None)
    return sum(tensor.nbytes for tensor in leaves(first)) * len(leaves(inputs)[0])
