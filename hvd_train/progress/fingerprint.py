"""Compute fingerprints of samples that add up over ranks and steps."""

from collections.abc import Iterable, Sequence

import numpy as np

from hvd_train.progress.order import Indices, scramble

NUM_BYTES = 8  # of `in_bytes`
_AT_ONCE = 1 << 20


def fingerprint(samples: Indices) -> int:
    """Return the sum of `scramble(number + 1)` modulo 2^64 over sample numbers, int64 [n].

    `scramble` maps numbers one to one, so other samples have the same fingerprint with a probability of 1 in 2^64.
    """
    return int(scramble(samples.astype(np.uint64) + np.uint64(1)).sum(dtype=np.uint64))


def added(fingerprints: Iterable[int]) -> int:
    """Return the fingerprint of all these fingerprints' samples."""
    return sum(fingerprints) % 2**64


def of_all(count: int) -> int:
    """Return the fingerprint of the samples 0, 1, ... `count` - 1."""
    return added(fingerprint(np.arange(start, min(start + _AT_ONCE, count))) for start in range(0, count, _AT_ONCE))


def in_bytes(value: int) -> tuple[float, ...]:
    """Return the NUM_BYTES bytes of a fingerprint. Their float32 sums over up to 65,000 ranks are exact."""
    return tuple(map(float, value.to_bytes(NUM_BYTES, "little")))


def from_bytes(sums: Sequence[float]) -> int:
    """Return the fingerprint of all ranks' samples from summed `in_bytes`."""
    return added(int(number) << 8 * place for place, number in enumerate(sums))
