"""Compute fingerprints of samples, which add up over ranks and steps in any order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hvd_train.progress.order import Indices, scramble

NUM_BYTES = 8  # of `in_bytes`
_AT_ONCE = 1 << 20


def fingerprint(samples: Indices) -> int:
    """Return the fingerprint, from 0 to 2^64 - 1, of sample numbers (int64 [n]) in any order.

    It is the sum of `scramble(number + 1)` modulo 2^64; different samples have the same one by a chance of 1 in 2^64.
    """
    return int(scramble(samples.astype(np.uint64) + np.uint64(1)).sum(dtype=np.uint64))


def added(fingerprints: Iterable[int]) -> int:
    """Return the fingerprint of all these fingerprints' samples."""
    return sum(fingerprints) % 2**64


def of_all(count: int) -> int:
    """Return the fingerprint of the samples 0, 1, ... `count` - 1."""
    starts = range(0, count, _AT_ONCE)
    return added(fingerprint(np.arange(start, min(start + _AT_ONCE, count))) for start in starts)


def in_bytes(value: int) -> tuple[float, ...]:
    """Return a fingerprint as NUM_BYTES numbers (0 to 255), whose float32 sums are exact up to 65,000 ranks."""
    return tuple(map(float, value.to_bytes(NUM_BYTES, "little")))


def from_bytes(sums: Sequence[float]) -> int:
    """Return the fingerprint of all ranks' samples from the sums of their `in_bytes`."""
    return added(int(number) << 8 * place for place, number in enumerate(sums))
