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
    assert all(math.isnan(value) for value in Totals().means().values())
