"""Compute an order of samples that reads few shards at a time. No torch.

The shards of an epoch, in a keyed permutation, are cut into streams, one for each micro-batch of a
step. A stream is shuffled within windows. So a rank reads the shards of its own micro-batches, and
any number of ranks has the same samples in the same micro-batches.

How well it shuffles, for ImageNet in 1,024 shards and steps of 8 micro-batches of 32 (full shuffle:
227 shards a step, 0.10% of the pairs of a step from one shard):

    window                     1,000   2,500   5,000   10,000   20,000   40,000
    shards of a step              14      23      38       64      104      149
    pairs from one shard        8.9%    5.4%    2.9%     1.6%     0.8%     0.5%
    shards of a micro-batch      1.8     2.8     4.7      8.0     13.0     18.6
"""

import numpy as np
from typing_extensions import override

from hvd_train.progress.order import (
    ROUNDS,
    BatchLayout,
    EpochOrder,
    Indices,
    Order,
    feistel,
    half_bits,
    key,
    scramble,
)

_SHARDS = 5  # in a key of random numbers: separates these orders from other uses of the seed


class ShardOrder(Order):
    """The order of one epoch. It takes memory for each shard, not for each sample."""

    def __init__(
        self,
        starts: Indices,
        window: int,
        seed: int,
        epoch: int,
        num_samples: int,
        layout: BatchLayout,
    ) -> None:
        """`starts` are the number of each shard's first sample, and at last of all samples.
        `window` is the number of samples of a stream that are shuffled with each other.
        """
        super().__init__(num_samples)
        shards = EpochOrder(key(seed, _SHARDS), epoch, len(starts) - 1)[:]
        self._first_samples = starts[shards]
        self._first_places = np.cumsum([0, *np.diff(starts)[shards]])  # in the permutation
        self._window = window
        self._key = np.uint64(key(seed, epoch, _SHARDS))
        self._set_streams(layout)

    def _set_streams(self, layout: BatchLayout) -> None:
        """Let each micro-batch of whole steps draw from its own stream, and the last, smaller or
        larger, step from another.
        """
        steps = layout.batches(range(self.num_samples))
        whole = len(steps) - (len(steps.ends[-1]) != layout.global_batch)
        widths = layout.micro_batches(range(layout.global_batch)).lengths
        rest = self.num_samples - whole * layout.global_batch
        self._layout = layout
        self._widths = np.array([*widths, 1])  # samples of a stream in a step
        self._lengths = np.array([*(whole * width for width in widths), rest])
        self._begins = np.cumsum([0, *self._lengths[:-1]])
        self._end_of_whole = whole * layout.global_batch

    @override
    def at(self, positions: Indices) -> Indices:
        shape = positions.shape
        positions = positions.reshape(-1)
        step, place = np.divmod(positions, self._layout.global_batch)
        last = len(self._widths) - 1
        stream = np.minimum(place // self._layout.micro_batch, last - 1)
        inside = step * self._widths[stream] + place - stream * self._layout.micro_batch
        is_rest = positions >= self._end_of_whole
        stream[is_rest] = last
        inside[is_rest] = positions[is_rest] - self._end_of_whole
        places = self._begins[stream] + self._shuffled(stream, inside)
        shard = np.searchsorted(self._first_places, places, side="right") - 1
        samples: Indices = self._first_samples[shard] + places - self._first_places[shard]
        return samples.reshape(shape)

    def _shuffled(self, stream: Indices, inside: Indices) -> Indices:
        """Return the places of a stream in other places of their windows, which differ in length by
        one at most.
        """
        length = self._lengths[stream]
        count = -(-length // self._window)  # of windows
        window = ((inside + 1) * count - 1) // length
        begin = window * length // count
        size = ((window + 1) * length // count - begin).astype(np.uint64)
        sizes = np.unique(size)
        bits = np.array([half_bits(int(each)) for each in sizes], np.uint64)
        half = bits[np.searchsorted(sizes, size)]
        own = scramble(scramble(stream.astype(np.uint64) ^ self._key) ^ window.astype(np.uint64))
        words = (inside - begin).astype(np.uint64)
        walking = np.arange(len(words))
        while len(walking):
            keys = (scramble(own[walking] ^ np.uint64(number)) for number in range(1, 1 + ROUNDS))
            words[walking] = feistel(words[walking], half[walking], keys)
            walking = walking[words[walking] >= size[walking]]
        places: Indices = begin + words.astype(np.int64)
        return places
