"""What classification measures: losses, and hits at the first five places."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hvd_train.progress.metrics import Totals
from hvd_train.tasks.classification import classification, hits
from tests.support.task_figures import in_training, scored
from tests.support.tasks import NUM_SUMS, meter_of_classes


def test_top_five() -> None:
    """The fifth best answer counts, the sixth does not."""
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0]] * 3)
    by_place = hits(logits, torch.tensor([0, 4, 5]))["hits"]
    assert by_place[:, 0].tolist() == [True, False, False]
    assert by_place.any(dim=1).tolist() == [True, True, False]


def test_sums_of_a_micro_batch() -> None:
    """With fewer classes than places all answers count, whatever the arithmetic."""
    meter, logits = meter_of_classes(("a", "b", "c")), torch.eye(3, dtype=torch.bfloat16)
    sums = meter.sums(logits.sum(1), logits, torch.tensor([0, 1, 0]))
    assert len(sums) == meter.training.size == NUM_SUMS
    assert meter.figures(Totals(tuple(sums.tolist()), 3)) == {"loss": 1.0, "top1": 2 / 3, "top5": 1.0}


def test_means_are_over_samples() -> None:
    """Not over batches; over none they are NaN."""
    meter = meter_of_classes()
    total = Totals((1.0, 1, 1, 0, 0, 0), 2) + Totals((8.0, 1, 0, 0, 0, 0), 4)
    assert meter.figures(total) == {"loss": 1.5, "top1": 2 / 6, "top5": 3 / 6}
    none = meter.figures(Totals())
    assert list(none) == ["loss", "top1", "top5"]
    assert all(math.isnan(value) for value in none.values())


def test_sums_have_a_place_for_each_of_the_first_five_answers() -> None:
    """The loss comes first, then the hits at each place alone, in float32; a sixth answer counts nowhere."""
    meter, losses = meter_of_classes(tuple("abcdefg")), torch.tensor([2.5, *[0.0] * 6], dtype=torch.float64)
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0]] * 7, dtype=torch.float64)
    sums = meter.sums(losses, logits, torch.tensor([0, 0, 0, 1, 4, 5, 6]))
    assert (sums.dtype, sums.tolist()) == (torch.float32, [2.5, 3, 1, 0, 0, 1])
    assert meter.figures(Totals(tuple(sums.tolist()), 7)) == {"loss": 2.5 / 7, "top1": 3 / 7, "top5": 5 / 7}


def test_fewer_classes_than_places_leave_the_last_ones_empty() -> None:
    """The hits of two classes are those at the first two places: sums of any training have one length."""
    meter, logits, targets = meter_of_classes(("a", "b")), torch.tensor([[1.0, 0.0]] * 3), torch.tensor([0, 1, 1])
    assert meter.sums(torch.tensor([1.0, 0.0, 0.0]), logits, targets).tolist() == [1, 1, 2, 0, 0, 0]
    by_place = hits(logits, targets)["hits"]
    assert (by_place[:, 0].tolist(), by_place.any(dim=1).tolist()) == ([True, False, False], [True] * 3)


def test_classes_by_hand(draw: torch.Generator) -> None:
    """Shares of right samples of each class, NaN without one, and top-1 of all; smoothing is for training alone."""
    logits, targets = torch.randn(17, 4, generator=draw), torch.randint(3, (17,), generator=draw)
    scores = scored(classification(tuple("abcd"), label_smoothing=0.2), logits, targets)
    right = logits.argmax(1) == targets
    expected = [right[targets == number].double().mean().item() for number in range(3)]
    assert [*scores.per_class.values()][:3] == pytest.approx(expected)
    assert math.isnan(scores.per_class["d"])
    assert scores["top1"] == right.double().mean().item()
    assert scores["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)
    assert np.isclose(
        in_training(classification(tuple("abcd"), label_smoothing=0.2), logits, targets)["loss"],
        F.cross_entropy(logits, targets, label_smoothing=0.2).item(),
    )
