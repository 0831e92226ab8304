"""Exact scores and the sums they are made of."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.loader import ArrayLoader
from hvd_train.data.prepare import Prepare
from hvd_train.validate import Scores, evaluate
from hvd_train.world.world import LocalWorld

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")


class Table(nn.Module):
    """Returns the image itself as logits: [n, 1, 1, classes]."""

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        return images.flatten(1)


def scores(model: nn.Module, images: Tensor, labels: list[int], micro: int = 2) -> Scores:
    classes = tuple("abcdefgh"[: images.shape[1]])
    data = Arrays(images.view(len(labels), 1, 1, -1), torch.tensor(labels), len(labels))
    whole = DataSet(data, data, classes, channels=1)
    loader = ArrayLoader(data, Prepare(whole, CPU, image_size=None, augment=None, colour=False), CPU, seed=0)
    return evaluate(model, loader, LocalWorld(), micro_batch=micro, classes=classes, device=CPU, autocast=nullcontext())


@pytest.mark.parametrize("micro", [1, 2, 100])
def test_scores_are_those_worked_out_by_hand(micro: int) -> None:
    """Five samples of three classes: two of three a are right, b is wrong, c is right; d has no sample."""
    logits = torch.zeros(5, 4)
    for row, column in enumerate([0, 0, 1, 2, 2]):
        logits[row, column] = math.log(7.0)  # 7 of 10 for one class, 1 of 10 for each of the others
    result = scores(Table(), logits, [0, 0, 0, 1, 2], micro)
    assert result.count == 5
    assert result.top1 == 3 / 5
    assert result.top5 == 1.0
    assert result.loss == pytest.approx((3 * math.log(10 / 7) + 2 * math.log(10)) / 5, rel=1e-6)
    assert result.per_class[:3] == (2 / 3, 0.0, 1.0)
    assert math.isnan(result.per_class[3])
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["per_class"]["d"] is None


def test_evaluation_leaves_each_layer_in_its_mode() -> None:
    """A frozen batch norm must not begin to learn statistics because of an evaluation."""
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2), nn.Dropout()).train()
    model[1].eval()
    scores(model, torch.rand(3, 2), [0, 1, 0])
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_small_losses_count_beside_a_large_one() -> None:
    """One loss of 2^24 and a hundred of log 2: in float32 each of the small ones would be rounded away."""
    large, count = 2.0**24, 100
    logits = torch.zeros(1 + count, 2)
    logits[0, 1] = large
    found = scores(Table(), logits, [0] * (1 + count), micro=1)
    assert found.loss * (1 + count) - large == pytest.approx(count * math.log(2.0), rel=1e-6)
