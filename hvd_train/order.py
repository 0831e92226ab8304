"""Which samples come next, and which rank computes them: pure functions of (seed, epoch, cursor, rank, size).

The order of an epoch is a pseudo-random permutation computed index by index in constant memory, so a data
set of 10^9 samples costs nothing to start or to resume in its middle. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_train.config import BatchConfig
from hvd_train.errors import UsageError

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_ROUNDS = 8  # 4 are enough for a pseudo-random permutation (Luby and Rackoff 1988); small domains like more
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
_BLOCK = 1 << 14  # indices computed at a time: a numpy call per batch would cost more than the batch's share


def scramble(words: Words) -> Words:
    """A bijective mix of 64-bit words in which each bit of the result depends on every bit given.

    The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Words = words ^ (words >> np.uint64(31))
        return mixed


def key(*numbers: int) -> int:
    """One 64-bit key for a tuple of integers, such as (seed, epoch): equal tuples give equal keys.

    SplitMix64 in Python integers: for a single number they are faster than numpy.
    """
    state = _GOLDEN
    for number in numbers:
        state = (state ^ (number & _WORD)) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state = ((state ^ (state >> 31)) + _GOLDEN) & _WORD
    return state


def uniforms(seed: int, epoch: int, indices: Indices, count: int) -> npt.NDArray[np.float32]:
    """Random numbers in [0, 1) that belong to the samples: shape [len(indices), count], float32.

    A sample is augmented the same way whichever rank, batch or position it comes in.
    """
    columns = np.array([key(seed, epoch, 1, column) for column in range(count)], dtype=np.uint64)
    words = scramble(scramble(indices.astype(np.uint64))[:, None] ^ columns[None, :])
    numbers: npt.NDArray[np.float32] = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return numbers


class EpochOrder:
    """The order of one epoch: a keyed permutation of 0..num_samples-1, in constant memory.

    A balanced Feistel network over the smallest even number of bits that holds num_samples; what falls
    outside is sent through again until it is inside (cycle walking; Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002), which is a bijection whatever the round function.
    """

    def __init__(self, seed: int, epoch: int, num_samples: int) -> None:
        self.num_samples = num_samples
        self._half = np.uint64(max(1, math.ceil((num_samples - 1).bit_length() / 2)))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(key(seed, epoch, 0, number)) for number in range(_ROUNDS)]
        self._block: tuple[int, Indices] = (-1, np.empty(0, dtype=np.int64))

    def __getitem__(self, span: slice) -> Indices:
        """Sample numbers at the positions of a slice with step 1, as int64; cut at the end of the epoch."""
        start, stop, _ = span.indices(self.num_samples)
        parts = []
        while start < stop:
            number, offset = divmod(start, _BLOCK)
            part = self._at_block(number)[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _at_block(self, number: int) -> Indices:
        if self._block[0] != number:
            stop = min((number + 1) * _BLOCK, self.num_samples)
            positions = np.arange(number * _BLOCK, stop, dtype=np.uint64)
            self._block = (number, self._permute(positions).astype(np.int64))
        return self._block[1]

    def _permute(self, words: Words) -> Words:
        words = self._feistel(words)
        outside = np.flatnonzero(words >= self.num_samples)
        while len(outside):
            words[outside] = self._feistel(words[outside])
            outside = outside[words[outside] >= self.num_samples]
        return words

    def _feistel(self, words: Words) -> Words:
        left, right = words >> self._half, words & self._mask
        for round_key in self._keys:
            left, right = right, left ^ (scramble(right ^ round_key) & self._mask)
        joined: Words = (left << self._half) | right
        return joined


class RepeatedOrder:
    """Repeated augmentation (Hoffer et al., arXiv 1901.09335): each sample `times` times in a row.

    Over `times` epochs every sample comes `times` times, as in as many epochs of `EpochOrder`. So that each copy is
    changed in its own way, copy c of sample s is number s + c * num_samples.
    """

    def __init__(self, seed: int, epoch: int, num_samples: int, times: int) -> None:
        self.num_samples, self._times = num_samples, times
        self._order = EpochOrder(seed, epoch - epoch % times, num_samples)
        self._before = epoch % times * num_samples

    def __getitem__(self, span: slice) -> Indices:
        """Numbers at the positions of a slice with step 1, as int64; cut at the end of the epoch."""
        start, stop, _ = span.indices(self.num_samples)
        positions = np.arange(self._before + start, self._before + max(start, stop), dtype=np.int64)
        if not len(positions):
            return positions
        first = int(positions[0]) // self._times
        samples = self._order[first : int(positions[-1]) // self._times + 1]
        return samples[positions // self._times - first] + positions % self._times * self.num_samples


def order_of(seed: int, epoch: int, num_samples: int, times: int) -> EpochOrder | RepeatedOrder:
    """The order of an epoch in which every sample comes `times` times in a row."""
    return EpochOrder(seed, epoch, num_samples) if times == 1 else RepeatedOrder(seed, epoch, num_samples, times)


@dataclass(frozen=True)
class Cut:
    """How a global batch is cut into micro-batches (slots) of at most `micro_batch` samples.

    Fixed when a run starts and kept for its life: batch norm and dropout act within a slot, so the same
    slots mean the same step on 1, 2 or 64 ranks.
    """

    global_batch: int
    micro_batch: int


@dataclass(frozen=True)
class Slot:
    """One micro-batch of a step: its number within the global batch, and the samples it holds."""

    number: int
    indices: Indices


@dataclass(frozen=True)
class Assignment:
    """What one rank does in one step: its slots, out of a global batch of `size` samples in `num_slots` slots."""

    size: int
    num_slots: int
    slots: tuple[Slot, ...]


def assignments(
    order: EpochOrder | RepeatedOrder | InSequence, cursor: int, cut: Cut, rank: int, size: int
) -> Iterator[Assignment]:
    """The steps of the rest of an epoch from `cursor`, as rank `rank` of `size` sees them.

    Rank r computes slots r, r + size, ... of each global batch; the last batch is smaller, and a rank may
    have no slot in it. Nothing is padded and nothing dropped.
    """
    for start in range(cursor, order.num_samples, cut.global_batch):
        batch = order[start : start + cut.global_batch]
        starts = range(0, len(batch), cut.micro_batch)
        slots = tuple(
            Slot(number, batch[starts[number] : starts[number] + cut.micro_batch])
            for number in range(rank, len(starts), size)
        )
        yield Assignment(size=len(batch), num_slots=len(starts), slots=slots)


class InSequence:
    """The order of an evaluation: as stored."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __getitem__(self, span: slice) -> Indices:
        """Sample numbers at the positions of a slice, as int64."""
        return np.arange(*span.indices(self.num_samples), dtype=np.int64)


def choose_cut(batch: BatchConfig, size: int, num_samples: int) -> Cut:
    """The cut of a new run on `size` ranks. Raises UsageError where the settings contradict or exceed the data."""
    per_worker, passes = batch.batch_size, batch.accumulation_steps
    if batch.global_batch_size is None:
        assert per_worker is not None  # BatchConfig has checked it
        total = per_worker * passes * size
    else:
        total = batch.global_batch_size
        if per_worker is not None and passes > 1 and per_worker * passes * size != total:
            raise UsageError(
                f"--global-batch-size {total} is not --batch-size {per_worker} x --accumulation-steps {passes} "
                f"x {size} workers = {per_worker * passes * size}; leave one of them out"
            )
    if total > num_samples:
        raise UsageError(
            f"a global batch of {total} samples is larger than the training set of {num_samples}; "
            f"type --global-batch-size {num_samples} or less"
        )
    return Cut(total, per_worker or math.ceil(total / (size * passes)))
