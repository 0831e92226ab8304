"""Micro-batches are dealt by the speed of the ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.progress.clock import PHASES
from hvd_train.progress.pace import FIELDS, Pace
from hvd_train.progress.shares import Shares, Speed, dealt

COUNT = 12
WINDOWS = itertools.count(1)  # no window is looked at twice
FORWARD = FIELDS - len(PHASES) + PHASES.index("forward")
speeds = st.builds(Speed, st.floats(0, 1), st.floats(0.01, 1))


def follow(shares: Shares, *each: float, windows: int = 1, count: int = COUNT) -> list[bool]:
    """Return in which windows the shares change, if ranks need these seconds a micro-batch."""
    pace = Pace(len(each))
    found = []
    for _ in range(windows):
        owners = shares.owners(shares.begins, count)
        for rank, seconds in enumerate(each):
            number = owners.count(rank)
            pace.window[rank, :3] = 1, number, number
            pace.window[rank, FORWARD] = number * seconds
        pace.windows = next(WINDOWS)
        shares.follow(pace, count, shares.begins)
        found.append(shares.take_change())
    return found


@given(st.lists(speeds, min_size=1, max_size=6), st.integers(1, 40))
def test_the_slowest_rank_is_as_fast_as_any_deal_allows(ranks: list[Speed], count: int) -> None:
    """Each rank has a micro-batch, if there are enough; to give one of the slowest rank to
    another would take longer.
    """
    owners = dealt(ranks, count)
    numbers = [owners.count(rank) for rank in range(len(ranks))]
    assert sum(numbers) == count
    assert min(numbers) >= (count >= len(ranks))
    each = np.array([speed.each for speed in ranks])
    seconds = [speed.fixed for speed in ranks] + numbers * each
    slowest = seconds.argmax()
    if numbers[slowest] > 1:
        with_one_more = np.delete(seconds + each, slowest)
        assert (with_one_more >= seconds[slowest] * (1 - 1e-12)).all()


@given(st.integers(1, 8), st.integers(0, 40))
def test_equal_ranks_take_turns(ranks: int, count: int) -> None:
    shares = Shares(ranks, 0, follow_speed=True)
    assert shares.owners(0, count) == [number % ranks for number in range(count)]


def test_shares_go_to_the_faster_rank_and_back() -> None:
    shares = Shares(2, 0, follow_speed=True)
    assert follow(shares, 1.0, 2.0, windows=3) == [False, False, True]
    assert shares.changed(COUNT) == {0: 8, 1: 4}
    # at most once in twelve windows, and only if it lasts
    assert follow(shares, 1.0, 1.0, windows=12) == [False] * 11 + [True]
    assert shares.changed(COUNT) == {}
    assert follow(shares, 1.0, 2.0, windows=2) == [False, False]
    assert follow(shares, 1.0, 1.0, windows=30) == [False] * 30


@pytest.mark.parametrize("seed", range(10))
def test_noise_changes_no_shares(seed: int) -> None:
    random = np.random.default_rng(seed)
    shares = Shares(3, 0, follow_speed=True)
    for _ in range(100):
        assert follow(shares, *(1 + 0.1 * random.standard_normal(3))) == [False]


def test_shares_stay_equal_unless_they_follow_the_speed() -> None:
    shares = Shares(2, 0, follow_speed=False)
    assert follow(shares, 1.0, 9.0, windows=20) == [False] * 20


def test_too_few_micro_batches_are_noted() -> None:
    """Two for two ranks, one of which is twice as slow: steps could be a third shorter."""
    shares = Shares(2, 0, follow_speed=True)
    follow(shares, 1.0, 2.0, windows=3, count=2)
    assert shares.loss == pytest.approx(1 / 3, abs=0.05)
    follow(shares, 1.0, 1.0, count=2)
    assert shares.loss == 0


def test_what_was_read_ahead_is_used_before_shares_change() -> None:
    """A rank with 6 of 12 micro-batches has read at most 10 of them, so 2 steps, ahead."""
    shares = Shares(2, 0, follow_speed=True, read_ahead=10)
    follow(shares, 1.0, 2.0, windows=3)
    assert shares.begins >= 2
    for step in range(shares.begins):
        assert shares.owners(step, COUNT).count(1) == 6
    assert shares.owners(shares.begins, COUNT).count(1) == 4


def test_a_world_begins_with_the_speeds_of_the_one_before() -> None:
    fast, slow = (Shares(2, rank, follow_speed=True) for rank in range(2))
    for shares in (fast, slow):
        follow(shares, 1.0, 2.0, windows=3)
    after = Shares(3, 0, follow_speed=True)
    after.begin([slow.speed, None, fast.speed], COUNT, step=7)
    owners = after.owners(7, COUNT)
    assert owners.count(0) < owners.count(1) < owners.count(2)
