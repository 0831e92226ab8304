"""Batches on the device, what loads them, and how the next one is prepared early."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hvd_train.data.dataset import Mark
from hvd_train.progress.order import Assignment, Indices


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a step, ready for the model."""

    number: int  # within its step
    inputs: Tensor  # [n, c, h, w] float
    targets: Tensor  # [n]
    samples: Indices  # [n]


@dataclass(frozen=True)
class Batch:
    """This rank's part of a step; `size` (samples) and `num_micro_batches` are of the global batch."""

    size: int
    num_micro_batches: int
    micro_batches: tuple[MicroBatch, ...]


class Loader(Protocol):
    """Turns the assignments of a rank into batches on its device, an epoch at a time."""

    num_samples: int

    def start(self) -> None:
        """Start the loader processes, so that the first batch is fast."""
        return

    def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
        """Yield the batches of these assignments of an epoch. Raises UsageError if a sample cannot be used."""

    def watch(self, mark: Mark) -> None:
        """Call `mark` at the end of each stage that images go through in this process."""

    def close(self) -> None:
        """End the loader processes, if there are any."""
        return


class Ahead:
    """An iterator over batches that can prepare the next one during the reduction."""

    def __init__(self, batches: Iterator[Batch], mark: Mark) -> None:
        self._batches, self._mark = batches, mark
        self._next: Batch | Exception | None = None

    def prepare(self) -> None:
        """Make the next batch ready; keep an error until that batch is requested."""
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
