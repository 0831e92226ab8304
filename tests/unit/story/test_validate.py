"""Exact scores and the sums they are made of."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.prepare import Prepare
from hvd_train.validate import Scores, evaluate
from hvd_train.world.world import LocalWorld

CPU = torch.device("cpu")


class Table(nn.Module):
    """Answers with the image itself as logits: [n, 1, 1, classes]."""

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        assert not self.training
        return images.flatten(1)


def scores(logits: Tensor, labels: list[int], classes: int, micro: int = 2) -> Scores:
    """Scores of a model that answers so."""
    data = Arrays(logits.view(len(labels), 1, 1, -1), torch.tensor(labels), len(labels))
    whole = DataSet(data, data, tuple("abcdefgh"[:classes]), channels=1)
    loader = ArrayLoader(data, Prepare(whole, CPU, image_size=None, augment=None, colour=False), CPU, seed=0)
    model = Table().train()
    result = evaluate(
        model, loader, LocalWorld(), micro_batch=micro, classes=whole.classes, device=CPU, autocast=nullcontext()
    )
    assert model.training, "evaluation must leave the model in the mode it found it in"
    return result


@pytest.mark.parametrize("micro", [1, 2, 5, 100])
def test_scores_are_those_worked_out_by_hand(micro: int) -> None:
    """Five samples of three classes: two of three a are right, b is wrong, c is right; d has no sample."""
    big = math.log(7.0)
    logits = torch.zeros(5, 4)
    for row, column in enumerate([0, 0, 1, 2, 2]):
        logits[row, column] = big  # the share of a sample's answer: 7 of 10, of the others 1 of 10 each
    result = scores(logits, [0, 0, 0, 1, 2], 4, micro)
    assert result.count == 5
    assert result.top1 == 3 / 5
    assert result.top5 == 1.0
    assert result.loss == pytest.approx((3 * math.log(10 / 7) + 2 * math.log(10)) / 5, rel=1e-6)
    assert result.per_class[:3] == (2 / 3, 0.0, 1.0)
    assert math.isnan(result.per_class[3])


def test_scores_as_json_have_no_nan() -> None:
    """A class without samples is null, which every JSON reader knows."""
    values = scores(torch.eye(2), [0, 0], 2).as_dict()
    text = json.dumps(values, allow_nan=False)
    assert json.loads(text)["per_class"] == {"a": 0.5, "b": None}
