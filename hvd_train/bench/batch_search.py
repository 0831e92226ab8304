"""Which batch `hvd-train bench batch` measures next, and what the measured ones say. Pure functions; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FALLEN = 0.9
"""Two sizes in a row slower than this share of the fastest end the search: larger ones are slower still."""
ENOUGH = 0.97
"""A size that reaches this share of the fastest is large enough."""


@dataclass(frozen=True)
class Row:
    """The result of one size. A value is None where it is not known; `failed` says why there is nothing at all."""

    batch_size: int
    """The samples of a rank in a pass, and in a step: one pass."""
    images_per_second: float | None = None
    """Of all ranks."""
    images_per_second_interval: Sequence[float] | None = None
    seconds_per_step: float | None = None
    steps: int | None = None
    """Those of a repetition."""
    peak_memory: float | None = None
    """The bytes that a rank held at most: torch on its GPU, or else the process; of the rank that held the most."""
    tflops_per_worker: float | None = None
    mfu: float | None = None
    failed: str | None = None


def next_size(rows: Sequence[Row], first: int, last: int) -> int | None:
    """Return the size to measure next, or None where the search is over.

    Sizes grow by two from `first` to `last`. Where one does not fit, those between it and the largest that fits are
    halved until they are an eighth of that one apart, or less; where the first does not fit, smaller ones are tried.
    """
    fits = [row.batch_size for row in rows if row.failed is None]
    too_large = smallest_failed(rows)
    if not fits:
        return first if too_large is None else too_large // 2 or None
    largest = max(fits)
    if too_large is None:
        return None if largest >= last or has_fallen(rows) else min(2 * largest, last)
    apart = granularity(largest)
    middle = (largest + too_large) // 2
    between = [size for size in (middle // apart * apart, -(-middle // apart) * apart) if largest < size < too_large]
    return between[0] if between else None


def granularity(largest: int) -> int:
    """Return how near the search comes to the largest size that fits: an eighth, rounded down to 1, 2, 4, 8, ..."""
    return int(max(1, 2 ** (largest.bit_length() - 1) // 8))


def smallest_failed(rows: Sequence[Row]) -> int | None:
    """Return the smallest size that did not fit, None where all did."""
    return min((row.batch_size for row in rows if row.failed is not None), default=None)


def has_fallen(rows: Sequence[Row]) -> bool:
    """Return whether the two largest sizes are both clearly slower than the fastest."""
    speeds = _speeds(rows)
    limit = FALLEN * max(speeds.values(), default=math.inf)
    return len(speeds) > 2 and all(speeds[size] < limit for size in sorted(speeds)[-2:])


def fastest(rows: Sequence[Row]) -> int:
    """Return the size with the most samples a second."""
    speeds = _speeds(rows)
    return max(speeds, key=lambda size: speeds[size])


def large_enough(rows: Sequence[Row]) -> int:
    """Return the smallest size that is about as fast as the fastest."""
    speeds = _speeds(rows)
    return min(size for size, speed in speeds.items() if speed >= ENOUGH * max(speeds.values()))


def share(rows: Sequence[Row], batch_size: int) -> float:
    """Return the speed of a size that was measured over that of the fastest."""
    speeds = _speeds(rows)
    return speeds[batch_size] / max(speeds.values())


def to_type(batch_size: int, total: int, ranks: int) -> list[str]:
    """Return lines that say how to train with this batch on so many ranks; `total` is the recipe's global batch."""
    own = batch_size * ranks
    if own == total:
        return [f"type --batch-size {batch_size}: the global batch is that of the recipe, {total}"]
    lines = [f"type --batch-size {batch_size}: the global batch is {own} then, and that of the recipe is {total}"]
    if total % own == 0:
        keeps = f"--batch-size {batch_size} --accumulation-steps {total // own}"
    else:
        keeps = f"--global-batch-size {total} --batch-size {min(batch_size, math.ceil(total / ranks))}"
    return [*lines, f"or {keeps}, which keeps the global batch of {total}"]


def _speeds(rows: Sequence[Row]) -> dict[int, float]:
    return {row.batch_size: row.images_per_second for row in rows if row.images_per_second is not None}
