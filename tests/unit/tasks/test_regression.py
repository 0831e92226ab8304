"""Errors and R2 against scikit-learn, and losses by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import (
    mean_absolute_error,
    mean_squared_error,
    r2_score,
)
from torch import Tensor

from hvd_train.tasks.regression import regression
from tests.support.task_figures import in_training, scored

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("outputs", [1, 3])
def test_errors_and_r2_are_those_of_scikit_learn(outputs: int, draw: torch.Generator) -> None:
    """Of one number for each sample and of several, far from zero too."""
    targets = torch.randn(23, outputs, generator=draw) + 100
    predicted = targets + 0.3 * torch.randn(23, outputs, generator=draw)
    scores = scored(regression(outputs), predicted, targets)
    assert scores["r2"] == pytest.approx(r2_score(targets.double(), predicted.double()), rel=1e-9)
    assert scores["rmse"] == pytest.approx(mean_squared_error(targets, predicted) ** 0.5, rel=1e-5)
    assert scores["mae"] == pytest.approx(mean_absolute_error(targets, predicted), rel=1e-5)
    shown = in_training(regression(outputs), predicted, targets)
    assert list(shown) == ["loss", "mae", "rmse"], "R2 needs all samples at once"
    assert [shown[name] for name in shown] == pytest.approx([scores[name] for name in shown], rel=1e-5)


def test_targets_that_are_all_the_same_have_no_r2() -> None:
    """There is nothing to explain; as in JSON, it is not known."""
    scores = scored(regression(1), torch.tensor([1.0, 2.0, 4.0]), torch.full((3,), 0.1))
    assert scores.as_dict()["r2"] is None


LOSSES: dict[str, Callable[..., Tensor]] = {"squared": F.mse_loss, "absolute": F.l1_loss, "huber": F.huber_loss}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_regression(name: str) -> None:
    """By hand for errors of 1/2, -3 and 0, and as torch has them; a model may return [n, 1] for targets [n]."""
    targets, errors = torch.tensor([5.0, -1.0, 2.0]), torch.tensor([0.5, -3.0, 0.0])
    by_hand = {"squared": [0.25, 9, 0], "absolute": [0.5, 3, 0], "huber": [0.125, 2.5, 0]}[name]
    task = regression(1, loss=name)
    assert task.loss((targets + errors).unsqueeze(1), targets).tolist() == pytest.approx(by_hand)
    assert scored(task, targets + errors, targets)["loss"] == pytest.approx(sum(by_hand) / 3)
    assert LOSSES[name](targets + errors, targets).item() == pytest.approx(sum(by_hand) / 3)


def test_whole_numbers_and_halves_are_targets_of_regression_too() -> None:
    """Their errors are those of the same numbers as float32."""
    predicted = torch.tensor([[1.5], [2.0]])
    for kind in (torch.int64, torch.float16, torch.float64):
        scores = scored(regression(1), predicted, torch.tensor([1, 4], dtype=kind))
        assert (scores["mae"], scores["loss"]) == (1.25, (0.25 + 4) / 2)
