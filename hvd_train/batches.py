"""The batches of this rank, step after step, in any world."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from hvd_train.config import Config
from hvd_train.data.loader import Ahead
from hvd_train.data.read_ahead import ReadAhead
from hvd_train.parts import Parts
from hvd_train.progress.clock import Split
from hvd_train.progress.order import (
    Batch,
    BatchLayout,
    Indices,
    MicroBatch,
    Order,
    Pieces,
    assignments,
    epoch_size,
)
from hvd_train.progress.shares import Shares
from hvd_train.state import TrainState
from hvd_train.world.world import Place

# add up the micro-batches of a rank in the opposite order, for `hvd-train prove`
REVERSED = "HVD_TRAIN_REVERSED"
# the first steps of a world in which ranks compare, so that early commits are trusted, too
_FIRST_COMPARED = 1, 10, 100


class Batches:
    """This rank's part of each step, as a function of the progress and the world."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        state: TrainState,
        place: Place,
        split: Split,
        shares: Shares,
    ) -> None:
        self._config = config
        self._parts = parts
        self._state = state
        self._place = place
        self._split = split
        self._shares = shares
        every = config.run.recheck_steps
        is_possible = place.size > 1 and not config.model.sync_batch_norm
        self._steps_before = state.progress.step  # this world
        self._recheck_steps = 0
        if is_possible and REVERSED not in os.environ:
            self._recheck_steps = parts.recheck_steps if every is None else every
        self._ahead: Ahead | None = None
        self._read_ahead: ReadAhead | None = None
        self._last: tuple[int, Batch] | None = None  # the last batch, and the steps before it

    @property
    def epoch_size(self) -> int:
        """The samples of an epoch."""
        return epoch_size(
            self._config.batch, self._state.layout, self._parts.train_loader.num_samples
        )

    def restart(self) -> None:
        """Drop what was made ahead: an epoch or another world begins, or the layout has changed."""
        self._ahead = None
        self._last = None
        if self._read_ahead is not None:
            self._read_ahead.stop()
            self._read_ahead = None

    def next(self, epoch: int) -> Batch:
        """Return the part of the step after the last one that is counted, which is of this epoch.

        Raises UsageError if a sample cannot be used.
        """
        step = self._state.progress.step
        if self._last is None or self._last[0] != step:
            batch = self._take(epoch)
            if not self._is_share(batch):  # it was made before the shares changed
                self.restart()
                batch = self._take(epoch)
            self._last = step, batch
            if self._read_ahead is not None:
                self._read_ahead.advance()
        return self._last[1]

    def _take(self, epoch: int) -> Batch:
        if self._ahead is None:
            if (shards := self._parts.shards) is not None:
                micro_batch = self._state.layout.micro_batch
                window = self._config.batch.shuffle_window // micro_batch
                work = self._work(epoch)
                self._read_ahead = ReadAhead(shards, work, 1 + window, self._place.local_size)
            work = self._work(epoch)
            if os.environ.get(REVERSED):
                work = (replace(batch, micro_batches=batch.micro_batches[::-1]) for batch in work)
            self._ahead = Ahead(self._parts.train_loader.load(epoch, work), self._split.mark)
        return next(self._ahead)

    def _is_share(self, batch: Batch) -> bool:
        """Return whether a batch has the micro-batches of this rank in the next step."""
        if not self._shares.follow_speed:
            return True
        numbers = sorted(micro.number for micro in batch.micro_batches)
        return numbers == self._shares.owned(self._state.progress.step, batch.num_micro_batches)

    def _work(self, epoch: int) -> Iterator[Batch]:
        """Return an iterator over what this rank reads of an epoch, from the next step on."""
        order = self._order(epoch)
        layout = self._state.layout
        progress = self._state.progress
        samples = range(progress.cursor, self.epoch_size)
        work = assignments(
            order,
            samples.start,
            layout,
            self._place.rank,
            self._place.size,
            samples.stop,
            partial(self._owned, progress.step) if self._shares.follow_speed else None,
        )
        if not self._recheck_steps:
            return work
        return self._rechecked(work, order, layout, samples, progress.step)

    def _rechecked(
        self, work: Iterator[Batch], order: Order, layout: BatchLayout, samples: range, step: int
    ) -> Iterator[Batch]:
        """Yield these batches of the steps after `step`, with micro-batches to compute again."""
        for number, batch in enumerate(work):
            if self._compares_in(step + number + 1):
                pieces = layout.micro_batches(layout.batches(samples)[number])
                other = self._of_next_rank(order, pieces)
                batch = replace(batch, is_rechecked=True, rechecked=other)
            yield batch

    def _compares_in(self, step: int) -> bool:
        """Return whether ranks compute micro-batches of one another again in this step."""
        is_due = step % self._recheck_steps == 0
        return is_due or step - self._steps_before in _FIRST_COMPARED

    def _of_next_rank(self, order: Order, pieces: Pieces) -> MicroBatch | None:
        """Return the first micro-batch of the next rank that has one, if it is another rank."""
        rank = self._place.rank
        # rank r has micro-batch r first, with any shares
        number = rank + 1 if rank + 1 < min(len(pieces), self._place.size) else 0
        if number == rank:
            return None
        positions = np.array(pieces[number], dtype=np.int64)
        seeds = positions if order.repeats else None
        return MicroBatch(number, order.at(positions), None, seeds)

    def _owned(self, first: int, number: int, count: int) -> list[int]:
        return self._shares.owned(first + number, count)

    def prepare(self) -> None:
        """Make the next batch ready while gradients are reduced."""
        if self._ahead is not None:
            self._ahead.prepare()

    def samples_of(self, epoch: int, cursor: int, size: int) -> Indices:
        """Return the numbers of the samples of all ranks in a step, int64 [size]."""
        return self._order(epoch)[cursor : cursor + size]

    def _order(self, epoch: int) -> Order:
        layout = self._state.layout
        if self._config.batch.on_resize == "per-worker":
            # The steps may change in mid-epoch, but not the micro-batches: an order that followed
            # the steps would repeat samples.
            layout = BatchLayout(layout.micro_batch, layout.micro_batch)
        num_samples = self._parts.train_loader.num_samples
        return self._parts.orders(self._config.seed, epoch, num_samples, layout)
