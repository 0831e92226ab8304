"""Settings of the schedule: what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_train.errors import UsageError
from hvd_train.settings.schedule import ScheduleConfig
from tests.support.refused import assert_refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs is 0"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs is -1"),
        ({"warmup_epochs": 11.0}, "--warmup-epochs 11 is longer than the whole run (--epochs 10)"),
        ({"decay_factor": 0.0}, "--decay-factor is 0"),
        ({"decay_epochs": (3.0, 2.0)}, "--decay-epochs must rise"),
        ({"target_accuracy": 1.5}, "--target-accuracy is 1.5; it must be at least 0 and at most 1"),
        ({"target_accuracy": 0.0}, "--target-accuracy is 0; it must be a number above 0"),
        ({"patience": 0}, "--patience is 0"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'?"),
        ({"min_learning_rate": -0.1}, "--min-learning-rate is -0.1"),
        ({"min_learning_rate": 0.2}, "--min-learning-rate 0.2 is above --learning-rate 0.1"),
        (
            {"min_learning_rate": 0.01, "schedule": "step"},
            "--min-learning-rate needs --schedule cosine, linear or one-cycle",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    """The message names the flag, the value and what it must be."""
    assert_refused(changes, message)


def test_the_whole_run_may_be_warm_up() -> None:
    """As many epochs of warm-up as there are epochs, and no fraction more."""
    assert ScheduleConfig(epochs=5, warmup_epochs=5).warmup_epochs == 5
    with pytest.raises(UsageError, match="longer than the whole run"):
        ScheduleConfig(epochs=5, warmup_epochs=5.5)
