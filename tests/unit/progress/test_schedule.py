"""The learning rate, against values worked out by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.errors import UsageError
from hvd_train.progress.schedule import check, learning_rate_factor, peak_learning_rate, same_until_end
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.settings.schedule import ScheduleConfig
from tests.support.own_schedules import HERE


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
    floor=st.floats(0, 1),
    kind=st.sampled_from(["constant", "cosine", "step", "linear", "one-cycle"]),
)
def test_the_factor_is_a_share(epochs: int, share: float, done: float, floor: float, kind: str) -> None:
    """Whatever the settings, the rate is never negative and never above its peak."""
    schedule = ScheduleConfig(epochs=epochs, schedule=kind, warmup_epochs=epochs * share)
    assert 0 <= learning_rate_factor(schedule, done, floor) <= 1 + 1e-12


@pytest.mark.parametrize(("done", "factor"), [(1, 0.5), (2, 1), (6, 0.6), (9, 0.3), (10, 0.2), (11, 0.2)])
def test_a_straight_line_down_to_the_least(done: float, factor: float) -> None:
    """From the end of the warm-up to the end of the run."""
    schedule = ScheduleConfig(epochs=10, schedule="linear", warmup_epochs=2)
    assert learning_rate_factor(schedule, done, floor=0.2) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("done", "factor"), [(0, 1), (5, 0.55), (10, 0.1), (12, 0.1)])
def test_half_a_cosine_down_to_the_least(done: float, factor: float) -> None:
    """And not below it."""
    schedule = ScheduleConfig(epochs=10, schedule="cosine")
    assert learning_rate_factor(schedule, done, floor=0.1) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("warmup", [0.0, 4.0])
def test_one_cycle_is_torchs(warmup: float) -> None:
    """Up from a 25th of the peak and down, with its own rise or that of --warmup-epochs, at each of torch's steps."""
    steps, rise = 100, warmup / 20 or 0.3
    schedule = ScheduleConfig(epochs=20, schedule="one-cycle", warmup_epochs=warmup)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    # Torch counts steps from 0 and has its peak one step before the rise ends: so many more of them than it says.
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=steps + 1, pct_start=(rise * steps + 1) / (steps + 1)
    )
    for step in range(steps + 1):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate_factor(schedule, 20 * step / steps, floor=1 / 25e4) == pytest.approx(expected, abs=1e-9)
        if step < steps:
            optimizer.step()
            cycle.step()


def test_ones_own_function() -> None:
    """It is given the epochs that are done and all of them, may go above the peak, and is multiplied by a warm-up."""
    schedule = ScheduleConfig(epochs=8, schedule=f"{HERE}:triangle")
    check(schedule)
    assert [learning_rate_factor(schedule, done) for done in (0, 2, 4, 7)] == [0, 1, 2, 0.5]
    warm = ScheduleConfig(epochs=8, schedule=f"{HERE}:triangle", warmup_epochs=4)
    assert [learning_rate_factor(warm, done) for done in (2, 4, 7)] == [0.5, 2, 0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("counts", "called twice with the same progress it returns different factors"),
        ("negative", "at epoch 7.6 of 10 it returned -0.04; it must be a number from 0 on"),
        ("text", "at epoch 0 of 10 it returned 'fast'; it must be a number"),
        ("nothing", "at epoch 0 of 10 it returned None; it must be a number"),
        ("fails", "at epoch 0 of 10: KeyError: 'x' ("),
        ("of_steps", "at epoch 0 of 10: TypeError: of_steps() takes 1 positional argument but 2 were given"),
        (
            "triangel",
            "unknown function in tests.support.own_schedules for --schedule 'triangel'; did you mean 'triangle'",
        ),
    ],
)
def test_a_function_that_is_no_schedule_is_told_before_the_run(name: str, message: str) -> None:
    """In one line, for the whole run."""
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        check(ScheduleConfig(epochs=10, schedule=f"{HERE}:{name}"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("schedule", "same"),
    [
        ("constant", True),
        ("step", True),
        ("cosine", False),
        ("linear", False),
        ("one-cycle", False),
        (f"{HERE}:halves", True),
        (f"{HERE}:triangle", False),
    ],
)
def test_what_a_longer_run_shares_with_a_shorter_one(schedule: str, same: bool) -> None:
    """A schedule that does not look at the number of epochs has the same rates, one's own too; others have not."""
    shorter, longer = (ScheduleConfig(epochs=n, schedule=schedule, decay_epochs=(3, 15)) for n in (10, 20))
    assert same_until_end(shorter, longer) == same
