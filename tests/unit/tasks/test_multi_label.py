"""Mean average precision against scikit-learn, and by hand where there is little to count."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
)

from hvd_train.tasks.multi_label import multi_label
from tests.support.task_figures import scored

pytestmark = pytest.mark.numeric


def test_mean_average_precision_is_that_of_scikit_learn(draw: torch.Generator) -> None:
    """Of each class, and their mean; scores come in tenths, so that many are equal."""
    logits = (torch.randn(41, 3, generator=draw) * 5).round() / 10
    truth = (torch.rand(41, 3, generator=draw) < 0.4).to(torch.uint8)
    scores = scored(multi_label(("a", "b", "c")), logits, truth)
    expected = average_precision_score(truth.numpy(), logits.numpy(), average=None)
    assert [*scores.per_class.values()] == pytest.approx(expected, rel=1e-12)
    assert scores["map"] == pytest.approx(expected.mean(), rel=1e-12)
    assert scores["label_accuracy"] == pytest.approx(((logits > 0) == truth).double().mean().item(), rel=1e-6)


def test_equal_scores_count_as_found_together() -> None:
    """One right sample of two that share the first place has precision 1/2, in whatever order they come."""
    for truth in ([[1.0], [0.0], [0.0]], [[0.0], [1.0], [0.0]]):
        scores = scored(multi_label(("a",)), torch.tensor([[2.0], [2.0], [1.0]]), torch.tensor(truth))
        assert scores["map"] == 0.5


def test_a_class_without_samples_is_left_out_of_the_mean() -> None:
    """Its own average precision is not known; without any class that has a sample neither is the mean."""
    task, logits = multi_label(("a", "b")), torch.tensor([[3.0, 1.0], [2.0, 5.0], [1.0, 0.0]])
    scores = scored(task, logits, torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]))
    assert scores["map"] == scores.per_class["a"] == pytest.approx((1 + 2 / 3) / 2)
    assert math.isnan(scores.per_class["b"])
    assert scores.as_dict()["per_class"] == {"a": pytest.approx(5 / 6), "b": None}
    nothing = scored(task, logits, torch.zeros(3, 2))
    assert math.isnan(nothing["map"])
    assert nothing.as_dict()["map"] is None
