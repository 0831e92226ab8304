"""Sums of losses and hits, the time of each phase, the speed of a training, and timers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.progress.clock import PHASES, Split, TrainingClock
from hvd_train.progress.metrics import Totals

PARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(-99, 99), st.integers(0, 9)))


@given(PARTS)
def test_means_are_of_all_samples(parts: list[tuple[int, int, int]]) -> None:
    """Sums and what divides them are added up before the division."""
    total = Totals()
    for count, loss, tokens in parts:
        total += Totals(
            count, {"loss": loss, "tokens": tokens}, {"loss": count, "tokens": 2 * tokens}
        )
    counts, losses, tokens = [*zip(*parts, strict=True)] or [(), (), ()]
    assert total.count == sum(counts)
    expected = {}
    if parts:
        expected = {"loss": sum(losses) / sum(counts), "tokens": 0.5 if any(tokens) else math.nan}
    assert total.means() == pytest.approx(expected, nan_ok=True)


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def test_each_phase_has_its_mean_seconds_per_step() -> None:
    """Marks of one phase in a step add up; evaluations do not count; each call starts from zero.

    Ranks send the sums until the last update but one, since a GPU is through with it.
    """
    clock = Clock()
    split = Split(clock)
    assert split.take() is None
    for wait in (1.0, 3.0) * 500:
        for phase, passed in (("data", wait), ("forward", 2), ("backward", 4), ("forward", 2)):
            clock.time += passed
            split.mark(phase)
        clock.time += 1.0
        split.end_update([7, 9])
        clock.time += 1000
        split.restart()
    assert split.times() == [999, 999 * 16, 999 * 2, 1997, 3996, 3996, 0, 999, 0]
    assert split.take() == dict(zip(PHASES, (2.0, 4.0, 4.0, 0.0, 1.0, 0.0), strict=True))
    assert split.times() == [1, 16, 2, 3, 4, 4, 0, 1, 0]
    assert split.take() is None


def test_speed_counts_training_alone() -> None:
    """The first five steps, evaluations and rendezvous do not count."""
    clock = Clock()
    watch = TrainingClock(None, Split(clock), clock)

    def speed_after(seconds, samples=10):
        clock.time += seconds
        watch.step(samples)
        return watch.samples_per_second

    assert [speed_after(seconds) for seconds in (30, 1, 1, 1, 1)] == [0.0] * 5
    speed_after(2)
    assert speed_after(3) == 20 / 5
    clock.time += 1  # the loader's wait at the end of the epoch is training
    with watch.paused():
        clock.time += 1000
    assert speed_after(4, 30) == 50 / 10
    clock.time += 1000
    watch.restart()
    assert speed_after(2) == 60 / 12
