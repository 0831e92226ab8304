"""How far one clock is ahead of another, found from barriers that both have seen. All times are nanoseconds.

Nobody leaves a barrier before everybody has come to it. So each barrier bounds the offset between two clocks from
below and from above, and several barriers bound it more tightly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvd_train.profiling.trace import Span


@dataclass(frozen=True)
class ClockOffset:
    """How far a clock is ahead of another one, and how much more or less that may be."""

    ahead_ns: int
    uncertainty_ns: int


NO_OFFSET = ClockOffset(0, 0)
BarrierTimes = Sequence[tuple[int, int]]
"""For each of some barriers, when a rank came to it and when it left it, by its own clock."""


def offset_between(mine: BarrierTimes, theirs: BarrierTimes) -> ClockOffset:
    """Return how far a rank's clock is ahead of another's, from the same barriers in the same order."""
    pairs = zip(mine, theirs, strict=True)
    return _offset_within(
        (came - their_leaving, left - their_coming) for (came, left), (their_coming, their_leaving) in pairs
    )


def offset_of_spans(spans: Sequence[Span], barriers: BarrierTimes) -> ClockOffset:
    """Return how far the clock of spans is ahead of a rank's; each span lies within the barrier of the same number.

    Without spans the clocks are taken to be the same.
    """
    pairs = list(zip(spans, barriers, strict=False))
    if not pairs:
        return NO_OFFSET
    return _offset_within((span.end - left, span.start - came) for span, (came, left) in pairs)


def _offset_within(bounds: Iterable[tuple[int, int]]) -> ClockOffset:
    """Return the offset that lies within all bounds (lowest, highest); 0 where that is possible, else their middle."""
    lows, highs = zip(*bounds, strict=True)
    low, high = sorted((max(lows), min(highs)))  # in reverse where a clock was set between two barriers
    if low <= 0 <= high:
        return ClockOffset(0, max(-low, high))
    return ClockOffset((low + high) // 2, (high - low + 1) // 2)
