"""Clocks of hosts that are compared through barriers."""

from __future__ import annotations

import random

import pytest

from hvd_train.profiling.clock_offsets import NO_OFFSET, ClockOffset, offset_between, offset_of_spans
from hvd_train.profiling.trace import Span


@pytest.mark.parametrize("ahead", [-5_000_000_000, -700, 0, 3_000, 40_000_000])
def test_an_offset_is_known_as_well_as_it_says(ahead: int) -> None:
    """Whatever a rank's clock shows, and however long messages take, the truth lies within the uncertainty."""
    chance = random.Random(1)
    mine, theirs, now = [], [], 10**18
    for _ in range(8):
        came, came_there = now + chance.randrange(10**6), now + chance.randrange(10**6)
        met = max(came, came_there)
        left, left_there = met + chance.randrange(1, 10**5), met + chance.randrange(1, 10**5)
        mine.append((came + ahead, left + ahead))
        theirs.append((came_there, left_there))
        now = max(left, left_there)
    found = offset_between(mine, theirs)
    assert abs(found.ahead_ns - ahead) <= found.uncertainty_ns <= 200_000


def test_spans_within_barriers_show_how_far_their_clock_is_ahead() -> None:
    """A clock that fits is taken for the same; one that does not is ahead by what the barriers allow."""
    barriers = [(1000, 2000), (3000, 4000)]
    assert offset_of_spans([Span("a", 1100, 1950), Span("b", 3050, 3900)], barriers) == ClockOffset(0, 50)
    assert offset_of_spans([Span("a", 6100, 6950), Span("b", 8050, 8900)], barriers) == ClockOffset(5000, 50)
    assert offset_of_spans([], barriers) == NO_OFFSET


def test_a_clock_that_was_set_between_two_barriers_has_the_uncertainty_of_the_change() -> None:
    """The bounds contradict each other then: the offset is between them."""
    mine, theirs = [(0, 100), (10_000, 10_100)], [(0, 100), (0, 100)]
    found = offset_between(mine, theirs)
    assert (found.ahead_ns, found.uncertainty_ns) == (5000, 4900)
