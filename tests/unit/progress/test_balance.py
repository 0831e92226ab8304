"""Slots dealt by speed: who gets how many, when they are dealt anew, and that each is still computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.progress.balance import PAUSE_S, STRETCH_S, Balance, longest
from hvd_train.progress.clock import PHASES
from hvd_train.progress.order import Cut, EpochOrder, assignments, dealt
from hvd_train.progress.slow_ranks import COLUMNS, Times

STEPS, SLOTS = 10, 12


def told(of_sample: Sequence[float], samples: Sequence[float] = (4, 4, 4)) -> Times:
    """What ranks tell whose forward passes take so many seconds a sample; the others wait for the last of them."""
    times = np.zeros((len(of_sample), len(COLUMNS)))
    times[:, COLUMNS.index("samples")] = samples
    work = np.array(of_sample) * np.array(samples)
    times[:, COLUMNS.index("forward")] = work
    times[:, COLUMNS.index("reduction")] = work.max() - work
    return times


def dealt_after(balance: Balance, times: Times, seconds: float) -> list[float]:
    """When the slots were dealt anew while ranks told the same for so long, in seconds."""
    of_one = STEPS * float(times[:, : len(PHASES)].sum(axis=1).max())
    anew = [balance.hear(times, STEPS, SLOTS) for _ in range(round(seconds / of_one))]
    return [number * of_one for number, is_new in enumerate(anew) if is_new]


def test_a_slow_rank_gets_fewer_slots() -> None:
    """Of 12 a rank of half the speed gets 2, and the two others 5 each."""
    balance = Balance([0, 1, 2], is_on=True)
    (when,) = dealt_after(balance, told([0.01, 0.02, 0.01]), 8)
    assert when == pytest.approx(STRETCH_S, abs=2 * STEPS * 0.08)
    assert balance.slots_of(SLOTS, 3) == [5, 2, 5]
    assert [balance.owner(slot, SLOTS) for slot in range(SLOTS)] == [0, 1, 2] * 4, "they are not dealt yet"
    owners = dealt(SLOTS, 3, balance.deal())
    assert [owners.count(rank) for rank in range(3)] == [5, 2, 5]
    assert [balance.owner(slot, SLOTS) for slot in range(SLOTS)] == list(owners)


def test_slots_are_dealt_once_a_minute_at_most() -> None:
    """However the speeds change meanwhile; then by what they are."""
    balance = Balance([0, 1, 2], is_on=True)
    assert len(dealt_after(balance, told([0.01, 0.02, 0.01]), 8)) == 1
    assert dealt_after(balance, told([0.02, 0.01, 0.01]), 40) == []
    assert len(dealt_after(balance, told([0.02, 0.01, 0.01]), PAUSE_S)) == 1
    assert balance.slots_of(SLOTS, 3) == [2, 5, 5]


def test_ranks_of_about_one_speed_keep_their_slots() -> None:
    """Where steps would hardly be shorter, nothing moves; without --balance it never does."""
    assert dealt_after(Balance([0, 1, 2], is_on=True), told([0.0100, 0.0102, 0.0099]), 300) == []
    assert dealt_after(Balance([0, 1, 2], is_on=False), told([0.01, 0.05, 0.01]), 300) == []


def test_a_rank_that_does_not_compute_has_no_slots() -> None:
    """A newcomer that is still given the state; the others share what there is."""
    balance = Balance([0, 2], is_on=True)
    times = told([0.01, 0.0, 0.03], [6, 0, 6])
    assert len(dealt_after(balance, times, 8)) == 1
    assert balance.slots_of(SLOTS, 3) == [9, 0, 3]
    balance.deal()
    assert {balance.owner(slot, SLOTS) for slot in range(SLOTS)} == {0, 2}


def test_nothing_is_dealt_by_speeds_that_are_not_known() -> None:
    """A rank that had no slot has no speed."""
    assert dealt_after(Balance([0, 1, 2], is_on=True), told([0.01, 0.05, 0.01], [6, 0, 6]), 300) == []


@given(
    seconds=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=6),
    num_slots=st.integers(1, 40),
)
def test_no_other_deal_is_done_sooner(seconds: list[float], num_slots: int) -> None:
    """Moving a slot from the rank that is done last to another one gains nothing; each has one, if there are enough."""
    owners = dealt(num_slots, len(seconds), seconds)
    assert len(owners) == num_slots
    counts = Counter(owners)
    if num_slots < len(seconds):
        assert owners == list(range(num_slots))
        return
    assert set(owners) == set(range(len(seconds)))
    time = longest(owners, seconds)
    last = max(counts, key=lambda rank: counts[rank] * seconds[rank])
    if counts[last] > 1:
        assert all((counts[rank] + 1) * seconds[rank] >= time * (1 - 1e-9) for rank in counts if rank != last)


def test_ranks_of_one_speed_take_slots_in_turn() -> None:
    """As without speeds."""
    assert list(dealt(11, 4, [0.5] * 4)) == list(dealt(11, 4)) == [0, 1, 2, 3] * 2 + [0, 1, 2]


@given(
    num_samples=st.integers(1, 300),
    cut=st.builds(Cut, st.integers(1, 64), st.integers(1, 20)),
    seconds=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5),
)
def test_each_slot_is_one_ranks(num_samples: int, cut: Cut, seconds: list[float]) -> None:
    """With the samples that it has anyhow, in each step of an epoch."""
    order, size = EpochOrder(1, 2, num_samples), len(seconds)
    ranks = [assignments(order, 0, cut, rank, size, seconds) for rank in range(size)]
    for parts, alone in zip(zip(*ranks, strict=True), assignments(order, 0, cut, 0, 1), strict=True):
        slots = sorted((slot for part in parts for slot in part.slots), key=lambda slot: slot.number)
        assert [(slot.number, slot.indices.tolist()) for slot in slots] == [
            (slot.number, slot.indices.tolist()) for slot in alone.slots
        ]
