"""Exact scores and the sums they are made of."""

from __future__ import annotations

import json
import math
import pickle
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.prepare import Prepare
from hvd_train.validate import Scores, evaluate
from hvd_train.world.world import LocalWorld
from tests.support.tasks import meter_of_classes

pytestmark = pytest.mark.numeric

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
    meter = meter_of_classes(whole.classes)
    result = evaluate(model, loader, LocalWorld(), micro_batch=micro, meter=meter, device=CPU, autocast=nullcontext())
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
    assert result["top1"] == 3 / 5
    assert result["top5"] == 1.0
    assert pickle.loads(pickle.dumps(result)).shown == result.shown
    assert result["loss"] == pytest.approx((3 * math.log(10 / 7) + 2 * math.log(10)) / 5, rel=1e-6)
    assert math.isnan(result.per_class["d"])
    assert {**result.per_class, "d": None} == {"a": 2 / 3, "b": 0.0, "c": 1.0, "d": None}


def test_scores_as_json_have_no_nan() -> None:
    """A class without samples is null, which every JSON reader knows."""
    values = scores(torch.eye(2), [0, 0], 2).as_dict()
    text = json.dumps(values, allow_nan=False)
    assert json.loads(text)["per_class"] == {"a": 0.5, "b": None}


def evaluated(model: nn.Module, images: Tensor, labels: Tensor, autocast: AbstractContextManager[object]) -> Scores:
    """Scores of a model on images as they are, one at a time."""
    data = Arrays(images, labels, len(labels))
    whole = DataSet(data, data, ("a", "b"), channels=1)
    loader = ArrayLoader(data, Prepare(whole, CPU, image_size=None, augment=None, colour=False), CPU, seed=0)
    meter = meter_of_classes(whole.classes)
    return evaluate(model, loader, LocalWorld(), micro_batch=1, meter=meter, device=CPU, autocast=autocast)


def test_layers_that_were_in_evaluation_mode_stay_there() -> None:
    """A frozen batch norm must not begin to learn statistics because of an evaluation."""
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2), nn.Dropout()).train()
    model[1].eval()
    evaluated(model, torch.rand(3, 1, 1, 2), torch.tensor([0, 1, 0]), nullcontext())
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_small_losses_count_beside_a_large_one() -> None:
    """One loss of 2^24 and a hundred of log 2: in float32 each of the small ones would be rounded away."""
    large, count = 2.0**24, 100
    logits = torch.zeros(1 + count, 1, 1, 2)
    logits[0, 0, 0, 1] = large
    found = evaluated(Table(), logits, torch.zeros(1 + count, dtype=torch.long), nullcontext())
    assert found["loss"] * (1 + count) - large == pytest.approx(count * math.log(2.0), rel=1e-6)


def test_evaluation_has_the_arithmetic_that_it_is_given() -> None:
    """Layers compute in the number format of the context."""
    seen = []
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model = nn.Sequential(nn.Flatten(), linear)
    evaluated(model, torch.rand(2, 1, 1, 2), torch.tensor([0, 1]), torch.autocast("cpu", dtype=torch.bfloat16))
    assert seen == [torch.bfloat16] * 2
