"""Sums of losses and hits."""

from __future__ import annotations

import math

import torch

from hvd_train.progress import metrics
from hvd_train.progress.metrics import Totals


def test_top_five() -> None:
    """The fifth best answer counts, the sixth does not."""
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0]] * 3)
    top1, top5 = metrics.hits(logits, torch.tensor([0, 4, 5]))
    assert top1.tolist() == [True, False, False]
    assert top5.tolist() == [True, True, False]


def test_sums_of_a_micro_batch() -> None:
    """With fewer classes than places all answers count, whatever the arithmetic."""
    logits = torch.eye(3, dtype=torch.bfloat16)
    sums = metrics.sums_of(logits.sum(), logits, torch.tensor([0, 1, 0]))
    assert len(sums) == metrics.NUM_SUMS
    assert Totals.of(sums.tolist(), 3) == Totals(3.0, 2.0, 3.0, 3)


def test_totals_add_and_divide_once() -> None:
    """Means are over samples, not over batches; over none they are NaN."""
    total = Totals(1.0, 1, 2, 2) + Totals(8.0, 1, 1, 4)
    assert total.means() == {"loss": 1.5, "top1": 2 / 6, "top5": 3 / 6}
    none = Totals().means()
    assert list(none) == ["loss", "top1", "top5"]
    assert all(math.isnan(value) for value in none.values())


def test_sums_have_a_place_for_each_of_the_first_five_answers() -> None:
    """The loss comes first, then the hits at each place alone, in float32; a sixth answer counts nowhere."""
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0]] * 7, dtype=torch.float64)
    sums = metrics.sums_of(torch.tensor(2.5, dtype=torch.float64), logits, torch.tensor([0, 0, 0, 1, 4, 5, 6]))
    assert (sums.dtype, sums.tolist()) == (torch.float32, [2.5, 3, 1, 0, 0, 1])
    assert Totals.of(sums.tolist(), 7) == Totals(2.5, 3, 5, 7)


def test_fewer_classes_than_places_leave_the_last_ones_empty() -> None:
    """The hits of two classes are those at the first two places."""
    logits = torch.tensor([[1.0, 0.0]] * 3)
    assert metrics.sums_of(torch.tensor(1.0), logits, torch.tensor([0, 1, 1])).tolist() == [1, 1, 2, 0, 0, 0]
    top1, top5 = metrics.hits(logits, torch.tensor([0, 1, 1]))
    assert (top1.tolist(), top5.tolist()) == ([True, False, False], [True] * 3)
