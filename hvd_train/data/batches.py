"""Batches on the device: what they hold, what a loader of them can do, and how the next one is prepared early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from hvd_train.data.dataset import Mark
from hvd_train.data.trees import Tree
from hvd_train.progress.order import Assignment, Indices
from hvd_train.progress.whereabouts import here


@dataclass(frozen=True)
class MicroBatch:
    """One slot of a step, ready for the model: inputs and targets, trees of tensors [n, ...], and sample numbers [n].

    Of images the inputs are [n, c, h, w] float, and the targets numbers of classes [n].

    `number` is that of the slot within its step.
    """

    number: int
    inputs: Tree
    targets: Tree
    samples: Indices


@dataclass(frozen=True)
class Batch:
    """This rank's part of a step; `size` (in samples) and `num_slots` are those of the whole global batch.

    `own_sizes` are the numbers of samples in this rank's slots. The micro-batches are to be gone through once: they may
    come to the device one by one.
    """

    size: int
    num_slots: int
    own_sizes: tuple[int, ...]
    micro_batches: Iterable[MicroBatch]


Begun = TypeVar("Begun")


class OneAhead(Iterator[MicroBatch], Generic[Begun]):
    """The micro-batches of a step, of which at most two are on the device: the one in use, and the next.

    The first is begun at once, and each other one when the one before it is asked for.
    """

    def __init__(self, beginnings: Iterator[Begun], finish: Callable[[Begun], MicroBatch]) -> None:
        """What is drawn from `beginnings` has begun: what takes its time on the way is done until it is finished."""
        self._beginnings, self._finish = beginnings, finish
        self._begun = self._next()

    def __next__(self) -> MicroBatch:
        if not self._begun:
            raise StopIteration
        micro = self._finish(self._begun.pop())
        self._begun = self._next()
        return micro

    def _next(self) -> list[Begun]:
        """Begin the next micro-batch, if there is one; this list alone holds it."""
        return list(islice(self._beginnings, 1))


class Loader(Protocol):
    """Turns the assignments of a rank into batches on its device, an epoch at a time."""

    num_samples: int

    def start(self) -> None:
        """Start what takes long to start, so that the first batch arrives as fast as any other."""

    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        """Yield the batches of these assignments of an epoch, in their order.

        Raises UsageError where a sample cannot be read or the samples of a batch do not fit together.
        """

    def watch(self, mark: Mark) -> None:
        """Call `mark`, from now on, at the end of each stage that images go through in this process."""

    def close(self) -> None:
        """End the loader processes, if there are any."""


class Ahead:
    """An iterator over batches that can prepare the next one early, while ranks still add up their gradients."""

    def __init__(self, batches: Iterator[Batch], mark: Mark) -> None:
        """Call `mark` with "data" whenever a batch is ready, or has failed to be."""
        self._batches, self._mark = batches, mark
        self._next: Batch | Exception | None = None

    def prepare(self) -> None:
        """Make the next batch ready. An error in doing so is kept, and raised when that batch is asked for."""
        here.at("data")
        try:
            self._next = next(self._batches)
        except Exception as error:  # noqa: BLE001  # a data set may raise anything; StopIteration ends the batches
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
