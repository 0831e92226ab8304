"""Slow ranks are found by the times that all ranks have."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_train.progress.clock import PHASES
from hvd_train.progress.pace import Pace, Slow

OWN = [phase for phase in PHASES if phase != "reduction"]
Work = tuple[int, int, dict[str, float]]
"""Samples, micro-batches, and milliseconds by phase."""


def times(*ranks: Work) -> npt.NDArray[np.float32]:
    """Return the message of a step; ranks wait for the slowest one."""
    rows = [
        (1, samples, micro_batches, *(phases.get(phase, 0.0) / 1000 for phase in PHASES))
        for samples, micro_batches, phases in ranks
    ]
    message = np.array(rows, np.float32)
    message[:, 3 + PHASES.index("reduction")] += message[:, 3:].sum(1).max() - message[:, 3:].sum(1)
    return message.ravel()


def play(pace: Pace, seconds: float, *ranks: Work) -> dict[int, Slow | None]:
    """Return the changes in so many seconds of equal steps."""
    step = times(*ranks)
    found = {}
    for _ in range(round(seconds / float(step[3 : 3 + len(PHASES)].sum()))):
        pace.add(step)
        found |= pace.take_changes()
    return found


def even(**phases: float) -> Work:
    return 16, 1, {"data": 10.0, "forward": 20.0, "backward": 30.0, "other": 5.0, **phases}


TWICE = even(forward=40.0, backward=60.0)[2]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("phase", OWN)
def test_a_slow_rank_is_named_once_and_once_more_when_it_has_recovered(
    phase: str, ranks: int
) -> None:
    """With its phase, within a minute; a pause of the others is no reason."""
    pace = Pace(ranks)
    slow = even(**{phase: 80.0})
    others = [even()] * (ranks - 1)
    assert play(pace, 60, even(), *others) == {}
    found = play(pace, 40, slow, *others)[0]
    assert found.phase == phase
    assert found.seconds == pytest.approx(0.08)
    assert found.median == pytest.approx(even()[2].get(phase, 0.0) / 1000)
    assert play(pace, 60, slow, *others) == {}
    works = [sum(milliseconds.values()) / 1000 for *_, milliseconds in (slow, *others)]
    assert pace.spread == pytest.approx({"slowest": works[0], "median": np.median(works)})
    assert play(pace, 45, even(), *others) == {0: None}
    assert play(pace, 60, even(), *others) == {}


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([even(backward=35.0), even()], "a tenth more"),
        ([even(reduction=500.0, forward=40.0), even(reduction=500.0)], "it hardly matters"),
        ([(32, 2, TWICE), even()], "two micro-batches"),
        ([(32, 1, TWICE), even()], "a larger one"),
        ([even(other=40), (2, 1, even(other=40)[2])], "smaller ones take as long"),
        ([(32, 2, even(other=200)[2]), even(other=200)], "as much code outside"),
        ([even(), (0, 0, {"other": 50.0})], "no work to compare"),
        ([even(), even(), (0, 0, {})], "no work to compare"),
    ],
)
def test_ranks_with_other_work_or_a_little_more_time_are_not_slow(
    ranks: list[Work], why: str
) -> None:
    assert play(Pace(len(ranks)), 120, *ranks) == {}, why


@settings(max_examples=20)
@given(st.lists(st.floats(0.0, 3.0), min_size=24, max_size=24), st.integers(2, 5))
def test_stalls_now_and_then_are_not_slow(stalls: list[float], quiet: int) -> None:
    """A loader may stall for seconds, if there are windows without it."""
    pace = Pace(3)
    for number, stall in enumerate(stalls):
        play(pace, 0.5, even(), even(), even(data=10 + 1000 * stall))
        assert pace.slow == {}
        if number % quiet == 0:
            play(pace, 11, even(), even(), even())


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_not_slow(seed: int) -> None:
    """On two ranks that other programs slow down by turns; a slow rank among them is named."""
    random = np.random.default_rng(seed)
    pace = Pace(2)

    def window(slower):
        first, second = 60 * np.exp(random.normal(0, 0.33, 2))
        return play(pace, 5, even(backward=first), even(backward=slower * second))

    assert not any(window(1.0) for _ in range(60))
    assert any(window(5.0).get(1) for _ in range(12))
