"""Compute the samples of each step, and their fingerprint: pure functions of progress, seed
and world size. No torch.

The order of an epoch is a permutation that is computed index by index, in constant memory for any
data set.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from hvd_train.config import BatchConfig
from hvd_train.errors import UsageError

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# 4 suffice for a pseudo-random permutation (Luby and Rackoff 1988); small domains profit from more
ROUNDS = 8
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
_BLOCK = 1 << 12  # the most samples of a rank, and the most steps, looked up at once
_STEPS = 64
_SMALL = 1 << 12  # up to this domain, a table of all words is computed once: it saves 20 us a step
_NONE = np.empty(0, dtype=np.int64)


def scramble(words: Words) -> Words:
    """Mix 64-bit words one to one: SplitMix64 (Steele et al., "Fast splittable
    pseudorandom number generators").
    """
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Words = words ^ (words >> np.uint64(31))
        return mixed


def key(*numbers: int, after: int = _GOLDEN) -> int:
    """Return a 64-bit key for a tuple of integers, such as (seed, epoch).

    `after` is the key of the numbers before them, if any.
    """
    # SplitMix64 in Python integers, which are faster than numpy for a single number
    state = after
    for number in numbers:
        state ^= number & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state = ((state ^ (state >> 31)) + _GOLDEN) & _WORD
    return state


def uniforms(seed: int, epoch: int, indices: Indices, count: int) -> npt.NDArray[np.float32]:
    """Return random numbers in [0, 1), float32 [len(indices), count].

    They depend on seed, epoch and sample alone.
    """
    columns = np.array([key(seed, epoch, 1, column) for column in range(count)], dtype=np.uint64)
    words = scramble(scramble(indices.astype(np.uint64))[:, None] ^ columns[None, :])
    numbers: npt.NDArray[np.float32] = (words >> np.uint64(40)).astype(np.float32) * np.float32(
        2.0**-24
    )
    return numbers


class Order:
    """Maps the positions of an epoch to samples: here in the stored order, as in an evaluation."""

    repeats = False
    """Whether a sample may come several times in an epoch."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples  # in the data set, and positions in the epoch

    def at(self, positions: Indices) -> Indices:
        """Return the samples at these positions, int64 of the same shape."""
        return positions

    def __getitem__(self, span: slice) -> Indices:
        return self.at(np.arange(*span.indices(self.num_samples), dtype=np.int64))


class EpochOrder(Order):
    """The order of one epoch: a keyed permutation of 0..num_samples-1, in constant memory.

    It is a Feistel network with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002).
    """

    def __init__(self, seed: int, epoch: int, num_samples: int) -> None:
        super().__init__(num_samples)
        self._half = np.uint64(half_bits(num_samples))
        self._keys = [np.uint64(key(seed, epoch, 0, number)) for number in range(ROUNDS)]
        domain = 1 << 2 * int(self._half)
        self._table = (
            self._feistel(np.arange(domain, dtype=np.uint64)) if domain <= _SMALL else None
        )

    @override
    def at(self, positions: Indices) -> Indices:
        words = self._permuted(positions.astype(np.uint64))
        outside = np.flatnonzero(words >= self.num_samples)
        while len(outside):
            words[outside] = self._permuted(words[outside])
            outside = outside[words[outside] >= self.num_samples]
        return words.astype(np.int64)

    def _permuted(self, words: Words) -> Words:
        return self._feistel(words) if self._table is None else self._table[words]

    def _feistel(self, words: Words) -> Words:
        return feistel(words, self._half, self._keys)


def half_bits(size: int) -> int:
    """Return half the bits of the smallest domain of `feistel` with `size` words."""
    return max(1, math.ceil((size - 1).bit_length() / 2))


def feistel(words: Words, half: Any, keys: Iterable[Any]) -> Words:
    """Permute words of 2 * `half` bits, with a key for each round; each word may have its own."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left = words >> half
    right = words & mask
    for round_key in keys:
        left, right = right, left ^ (scramble(right ^ round_key) & mask)
    joined: Words = (left << half) | right
    return joined


class GivenOrder(Order):
    """An order that is kept as a whole."""

    def __init__(self, samples: Indices) -> None:
        super().__init__(len(samples))
        self._samples = samples

    @override
    def at(self, positions: Indices) -> Indices:
        found: Indices = self._samples[positions]
        return found


def in_order(seed: int, epoch: int, num_samples: int) -> Indices:
    """Return the samples as they are stored: an order for a Session."""
    return np.arange(num_samples, dtype=np.int64)


@dataclass(frozen=True)
class Pieces:
    """Positions in pieces of `length`.

    With `join`, a remainder of one position joins the piece before it.
    """

    span: range
    length: int
    join: bool

    @cached_property
    def count(self) -> int:
        """The number of pieces."""
        joined = self.join and len(self.span) > 1
        return math.ceil((len(self.span) - joined) / self.length)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> range:
        stop = len(self.span) if number == self.count - 1 else (number + 1) * self.length
        return self.span[number * self.length : stop]

    @property
    def lengths(self) -> list[int]:
        """The length of each piece."""
        return [len(self[number]) for number in range(len(self))]

    @property
    def ends(self) -> list[range]:
        """The first and the last piece, which may be the same; empty without pieces."""
        return [self[0], self[len(self) - 1]] if self.span else []


@dataclass(frozen=True)
class BatchLayout:
    """The sizes of global batches and micro-batches, in samples.

    A run keeps its layout: batch norm and dropout act within a micro-batch, so the same
    micro-batches mean the same step on any number of ranks. Batch norm needs two samples, so a
    remainder of one joins the batch before it.
    """

    global_batch: int
    micro_batch: int

    def batches(self, epoch: range) -> Pieces:
        """Return the global batches of these positions, one for each step."""
        return Pieces(epoch, self.global_batch, self._join)

    def micro_batches(self, batch: range) -> Pieces:
        """Return the micro-batches of a global batch."""
        return Pieces(batch, self.micro_batch, self._join)

    @property
    def _join(self) -> bool:
        return min(self.global_batch, self.micro_batch) > 1


UNDECIDED = BatchLayout(0, 0)  # before it is known whether the run is new


Orders = Callable[[int, int, int, BatchLayout], Order]
"""Returns the order for a seed, an epoch (counted from 0), a number of samples and the layout of
the steps, on which few orders depend."""
ORDERS: dict[str, Orders] = {
    "shuffled": lambda seed, epoch, num_samples, layout: EpochOrder(seed, epoch, num_samples),
    "in-order": lambda seed, epoch, num_samples, layout: Order(num_samples),
}


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a step: its number within the global batch, its samples, and
    their items for the model.
    """

    number: int
    samples: Indices  # [n]
    # (images [n, c, h, w] float, class numbers [n]), or a tree of tensors; None until it is loaded
    batch: Any = None
    positions: Indices | None = None  # in the epoch, if a sample may come several times

    @property
    def seeds(self) -> Indices:
        """What the random numbers of each item belong to: its sample or, if samples come
        several times, its position.
        """
        return self.samples if self.positions is None else self.positions


@dataclass(frozen=True)
class Batch:
    """A rank's part of a step; `size` (samples) and `num_micro_batches` are of the global batch."""

    size: int
    num_micro_batches: int
    micro_batches: tuple[MicroBatch, ...]
    is_rechecked: bool = False  # whether ranks compute micro-batches of one another again
    # which this rank computes again, if any; it counts for its own rank
    rechecked: MicroBatch | None = None

    @property
    def passes(self) -> tuple[MicroBatch, ...]:
        """All micro-batches that this rank computes, in the order in which it does."""
        return (
            self.micro_batches if self.rechecked is None else (self.rechecked, *self.micro_batches)
        )


def epoch_size(batch: BatchConfig, layout: BatchLayout, num_samples: int) -> int:
    """Return the samples of an epoch: all of them or, with `--drop-last`,
    those of whole global batches.
    """
    return num_samples - num_samples % layout.global_batch if batch.drop_last else num_samples


Owned = Callable[[int, int], Sequence[int]]
"""Returns the numbers of a rank's micro-batches in a step, by the number of the step and of all
its micro-batches; another object if they have changed."""


def assignments(
    order: Order,
    cursor: int,
    layout: BatchLayout,
    rank: int,
    size: int,
    stop: int | None = None,
    owned: Owned | None = None,
) -> Iterator[Batch]:
    """Yield a rank's part of each step from `cursor` to position `stop`
    (the last one), to be loaded.

    Rank r computes micro-batches r, r + size, ... of each global batch, or the ones that it owns.
    The last batch may be smaller, and a rank may have no micro-batch in it. No sample is repeated
    or dropped.
    """
    of_rank = max(1, math.ceil(layout.global_batch / size))
    steps = layout.batches(range(cursor, order.num_samples if stop is None else stop))
    at_once = min(_STEPS, math.ceil(_BLOCK / of_rank))
    in_turns: Owned = lambda _, count: range(rank, count, size)  # noqa: E731
    done = 0
    while done < len(steps):
        # Positions of several steps are looked up at once: a numpy call costs more than the samples
        # of a micro-batch.
        numbers = range(done, min(done + at_once, len(steps)))
        pieces = [layout.micro_batches(steps[number]) for number in numbers]
        mine = [
            (owned or in_turns)(number, len(piece))
            for number, piece in zip(numbers, pieces, strict=True)
        ]
        spans = [piece[n] for piece, own in zip(pieces, mine, strict=True) for n in own]
        positions = [np.arange(span.start, span.stop, dtype=np.int64) for span in spans]
        samples = order.at(np.concatenate([_NONE, *positions]))
        ends = itertools.accumulate(map(len, spans), initial=0)
        of_micro_batches = (samples[start:stop] for start, stop in itertools.pairwise(ends))
        of_positions = iter(positions if order.repeats else [None] * len(positions))
        for number, piece, own in zip(numbers, pieces, mine, strict=True):
            if owned is not None and owned(number, len(piece)) is not own:
                break  # the shares have changed since
            micro_batches = tuple(
                MicroBatch(n, next(of_micro_batches), None, next(of_positions)) for n in own
            )
            yield Batch(len(steps[number]), len(piece), micro_batches)
            done = number + 1


def choose_layout(batch: BatchConfig, size: int, num_samples: int) -> BatchLayout:
    """Return the layout of a new run on `size` ranks.

    Raises UsageError if it is too large or lacks a batch size.
    """
    return check_fits(layout_for(batch, size), num_samples)


def layout_for(batch: BatchConfig, size: int) -> BatchLayout:
    """Return the layout of a new run for any training set.

    Raises UsageError if it lacks a batch size.
    """
    if batch.global_batch_size is None:
        return _per_worker(batch, size)
    if batch.batch_size is None and batch.accumulation_steps > 1:
        raise UsageError(
            "--accumulation-steps with --global-batch-size needs --batch-size, "
            "the samples of a pass"
        )
    return BatchLayout(
        batch.global_batch_size, batch.batch_size or _micro_batch_size(batch.global_batch_size)
    )


def check_fits(layout: BatchLayout, num_samples: int) -> BatchLayout:
    """Return the layout of a new run.

    Raises UsageError if its batch is larger than the training set.
    """
    if layout.global_batch > num_samples:
        raise UsageError(
            f"a global batch of {layout.global_batch} samples is larger than the training set of "
            f"{num_samples}; type --global-batch-size {num_samples} or less"
        )
    return layout


def resized_layout(batch: BatchConfig, size: int, num_samples: int) -> BatchLayout:
    """Return the layout of a run with `--on-resize per-worker` on `size` ranks."""
    layout = _per_worker(batch, size)
    return BatchLayout(min(layout.global_batch, num_samples), layout.micro_batch)


def _per_worker(batch: BatchConfig, size: int) -> BatchLayout:
    assert batch.batch_size is not None  # BatchConfig has checked it
    return BatchLayout(batch.batch_size * batch.accumulation_steps * size, batch.batch_size)


def _micro_batch_size(global_batch: int) -> int:
    """Return the default: 16 to 48 samples, in 1, 2, 4, 8 or a multiple of 8
    micro-batches if possible.
    """
    few = next(number for number in (8, 4, 2, 1) if global_batch >= 16 * number or number == 1)
    return math.ceil(global_batch / max(few, 8 * round(global_batch / (8 * 32))))


def fingerprint(samples: Indices) -> int:
    """Return the sum of `scramble(number + 1)` modulo 2^64 over sample numbers, int64 [n].

    `scramble` maps numbers one to one, so other samples have the same fingerprint with a
    probability of 1 in 2^64.
    """
    return int(scramble(samples.astype(np.uint64) + np.uint64(1)).sum(dtype=np.uint64))


def added(fingerprints: Iterable[int]) -> int:
    """Return the fingerprint of all these fingerprints' samples."""
    return sum(fingerprints) % 2**64


def in_bytes(value: int) -> tuple[float, ...]:
    """Return the 8 bytes of a fingerprint. Their float32 sums over up to 65,000 ranks are exact."""
    return tuple(map(float, value.to_bytes(8, "little")))


def from_bytes(sums: Sequence[float]) -> int:
    """Return the fingerprint of all ranks' samples from summed `in_bytes`."""
    return added(int(number) << 8 * place for place, number in enumerate(sums))
