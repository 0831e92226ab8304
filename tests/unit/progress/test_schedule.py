"""The learning rate, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.progress.schedule import learning_rate_factor, peak_learning_rate
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.settings.schedule import ScheduleConfig


@pytest.mark.parametrize(
    ("scaling", "batch", "expected"),
    [("none", 1024, 0.1), ("linear", 1024, 0.4), ("linear", 64, 0.025), ("sqrt", 1024, 0.2), ("sqrt", 64, 0.05)],
)
def test_the_peak_follows_the_global_batch(scaling: str, batch: int, expected: float) -> None:
    """Not, in proportion, or with its square root, from the batch the rate was chosen for."""
    optimizer = OptimizerConfig(learning_rate=0.1, lr_base_batch=256, lr_scaling=scaling)
    assert peak_learning_rate(optimizer, batch) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("done", "factor"),
    [(0, 0), (0.5, 0.1), (2.5, 0.5), (5, 1), (10, 0.5 + math.sqrt(2) / 4), (15, 0.5), (25, 0), (26, 0)],
)
def test_warm_up_and_half_a_cosine(done: float, factor: float) -> None:
    """Up in a straight line over the warm-up, then down to zero at the last epoch, and no further."""
    schedule = ScheduleConfig(epochs=25, schedule="cosine", warmup_epochs=5)
    assert learning_rate_factor(schedule, done) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(("done", "factor"), [(0, 1), (29.99, 1), (30, 0.1), (59.9, 0.1), (60, 0.01), (80, 0.001)])
def test_steps_down(done: float, factor: float) -> None:
    """The rate falls by the factor exactly at each of the epochs."""
    schedule = ScheduleConfig(epochs=90, schedule="step", decay_epochs=(30, 60, 80), decay_factor=0.1)
    assert learning_rate_factor(schedule, done) == pytest.approx(factor, rel=1e-12)


def test_constant_after_the_warm_up() -> None:
    """A constant rate is the peak from the end of the warm-up on."""
    schedule = ScheduleConfig(epochs=10, schedule="constant", warmup_epochs=2)
    assert [learning_rate_factor(schedule, done) for done in (1, 2, 9.9)] == [0.5, 1.0, 1.0]


def test_a_warm_up_as_long_as_the_run_ends_at_zero_without_dividing_by_it() -> None:
    """Warm-up over all epochs leaves no cosine."""
    schedule = ScheduleConfig(epochs=3, schedule="cosine", warmup_epochs=3)
    assert learning_rate_factor(schedule, 2.99) == pytest.approx(2.99 / 3)
    assert learning_rate_factor(schedule, 3) == pytest.approx(0, abs=1e-12)


@given(
    epochs=st.integers(1, 200),
    share=st.floats(0, 1),
    done=st.floats(0, 300),
    kind=st.sampled_from(["constant", "cosine", "step"]),
)
def test_the_factor_is_a_share(epochs: int, share: float, done: float, kind: str) -> None:
    """Whatever the settings, the rate is never negative and never above its peak."""
    schedule = ScheduleConfig(epochs=epochs, schedule=kind, warmup_epochs=epochs * share)
    assert 0 <= learning_rate_factor(schedule, done) <= 1
