"""The batches of this rank, step after step, in any world."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from hvd_train.config import Config
from hvd_train.data.loader import Ahead
from hvd_train.data.read_ahead import ReadAhead
from hvd_train.parts import Parts
from hvd_train.progress.clock import Split
from hvd_train.progress.order import Batch, Indices, Order, assignments, epoch_size
from hvd_train.progress.shares import Shares
from hvd_train.state import TrainState
from hvd_train.world.world import Place

# add up the micro-batches of a rank in the opposite order, for `hvd-train prove`
REVERSED = "HVD_TRAIN_REVERSED"


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
        self._known_change = 0  # the last change of shares that was looked at
        self._restarts_at: int | None = None  # the step at which what was made ahead is too much
        self._assigned = 0  # the last step that the loader has got to read
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
        if self._read_ahead is not None:
            self._read_ahead.stop()
            self._read_ahead = None

    def next(self, epoch: int) -> Batch:
        """Return the part of the step after the last one that is counted, which is of this epoch.

        Raises UsageError if a sample cannot be used.
        """
        state = self._state
        shares = self._shares
        step = state.progress.step
        if self._known_change != shares.begins:
            self._known_change = shares.begins
            if self._assigned >= shares.begins and self._restarts_at is None:
                self._restarts_at = shares.begins
        if step == self._restarts_at and self._is_new_step:
            self.restart()
        if self._ahead is None:
            self._last = None
            self._restarts_at = None
            work = self._work(epoch, step)
            if (shards := self._parts.shards) is not None:
                window = self._config.batch.shuffle_window // state.layout.micro_batch
                self._read_ahead = ReadAhead(shards, self._work(epoch, step), 1 + window)
            if os.environ.get(REVERSED):
                work = (replace(batch, micro_batches=batch.micro_batches[::-1]) for batch in work)
            work = self._noted(step, work)
            self._ahead = Ahead(self._parts.train_loader.load(epoch, work), self._split.mark)
        if self._last is None or self._is_new_step:
            self._last = state.progress.step, next(self._ahead)
            if self._read_ahead is not None:
                self._read_ahead.advance()
        return self._last[1]

    def _work(self, epoch: int, step: int) -> Iterator[Batch]:
        """Yield what this rank reads of an epoch, from the step after this many steps on."""
        return assignments(
            self._order(epoch),
            self._state.progress.cursor,
            self._state.layout,
            self._place.rank,
            self._place.size,
            self.epoch_size,
            partial(self._owned, step) if self._shares.follow_speed else None,
        )

    def _noted(self, first: int, work: Iterable[Batch]) -> Iterator[Batch]:
        for self._assigned, batch in enumerate(work, first):
            yield batch

    def _owned(self, first: int, number: int, count: int) -> list[int]:
        return self._shares.owned(self._place.rank, first + number, count)

    @property
    def _is_new_step(self) -> bool:
        return self._last is None or self._last[0] != self._state.progress.step

    def prepare(self) -> None:
        """Make the next batch ready while gradients are reduced."""
        if self._ahead is not None:
            self._ahead.prepare()

    def samples_of(self, epoch: int, cursor: int, size: int) -> Indices:
        """Return the numbers of the samples of all ranks in a step, int64 [size]."""
        return self._order(epoch)[cursor : cursor + size]

    def _order(self, epoch: int) -> Order:
        order = self._parts.orders(self._config.seed, epoch, self._parts.train_loader.num_samples)
        # another layout in mid-epoch would mean other streams, with samples that were taken
        is_fixed = self._config.batch.on_resize == "global"
        return order.dealt(self._state.layout) if is_fixed else order
