"""The learning rate, against values worked out by hand."""

import math
from typing import Any

import pytest
import torch

from hvd_train.config import OptimizerConfig, ScheduleConfig
from hvd_train.progress.schedule import learning_rate_factor, peak_learning_rate


@pytest.mark.parametrize(
    ("scaling", "batch", "expected"),
    [
        ("none", 1024, 0.1),
        ("linear", 64, 0.025),
        ("sqrt", 1024, 0.2),
    ],
)
def test_the_peak_follows_the_global_batch(scaling: str, batch: int, expected: float) -> None:
    optimizer = OptimizerConfig(learning_rate=0.1, lr_base_batch=256, lr_scaling=scaling)
    assert peak_learning_rate(optimizer, batch) == pytest.approx(expected, rel=1e-12)


COSINE = {0: 0, 2.5: 0.5, 5: 1, 10: 0.5 + math.sqrt(2) / 4, 15: 0.5, 25: 0, 26: 0}


def a_third(epochs_done: float) -> float:
    return 1 / 3


@pytest.mark.parametrize(
    ("schedule", "settings", "factors"),
    [
        ("cosine", {"epochs": 25, "warmup_epochs": 5}, COSINE),
        ("cosine", {"epochs": 4, "final_factor": 0.2}, {0: 1, 2: 0.6, 4: 0.2, 5: 0.2}),
        ("cosine", {"epochs": 3, "warmup_epochs": 3}, {2.99: 2.99 / 3, 3: 0}),
        (
            "step",
            {"epochs": 90, "decay_epochs": (30, 60), "decay_factor": 0.1},
            {0: 1, 29.99: 1, 30: 0.1, 59.9: 0.1, 60: 0.01},
        ),
        ("constant", {"epochs": 10, "warmup_epochs": 2}, {1: 0.5, 2: 1.0, 9.9: 1.0}),
        (
            "linear",
            {"epochs": 6, "warmup_epochs": 2, "final_factor": 0.5},
            {1: 0.5, 4: 0.75, 6: 0.5},
        ),
        (f"{__name__}:a_third", {}, {0: 1 / 3, 9: 1 / 3}),
    ],
)
def test_the_rate_is_a_function_of_the_epochs_done(
    schedule: str, settings: dict[str, Any], factors: dict[float, float]
) -> None:
    """It rises linearly in the warm-up, then follows the schedule to its end."""
    config = ScheduleConfig(schedule=schedule, **settings)
    for done, factor in factors.items():
        found = learning_rate_factor(config, done)
        assert found == pytest.approx(factor, rel=1e-12, abs=1e-12)


def test_one_cycle_is_that_of_torch() -> None:
    """torch counts the steps of its warm-up from 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    of_torch = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2.0, total_steps=101, pct_start=31 / 101
    )
    for step in range(101):
        factor = learning_rate_factor(ScheduleConfig(epochs=100, schedule="one-cycle"), step)
        assert 2 * factor == pytest.approx(of_torch.get_last_lr()[0], abs=2e-6)
        optimizer.step()
        of_torch.step()
