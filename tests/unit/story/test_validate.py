"""Scores of an evaluation."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train import Config
from hvd_train.data.dataset import Arrays
from hvd_train.data.loader import ArrayLoader
from hvd_train.tasks.builtin import classification
from hvd_train.tasks.task import Measures, Measuring, Scores, Total
from hvd_train.validate import evaluate
from hvd_train.world.world import LocalWorld, World
from tests.support import runs
from tests.support.runs import CLASSIFY, CPU, PLAIN, small_config
from tests.support.worlds import own_generator, run_ranks


class Table(nn.Module):
    """Return the image itself as logits: [n, 1, 1, classes]."""

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        return images.flatten(1)


def scores(model: nn.Module, images: Tensor, labels: list[int], micro: int = 2) -> Scores:
    data = Arrays(images.view(len(labels), 1, 1, -1), torch.tensor(labels), len(labels))
    loader = ArrayLoader(data, PLAIN, CPU, seed=0)
    config = Config().replace(eval_batch_size=micro)
    task = classification(config, tuple("abcdefgh"[: images.shape[1]]))
    return evaluate(config, CPU, task, Measuring(task.evaluate), model, loader, LocalWorld())


@pytest.mark.parametrize("micro", [1, 2, 100])
def test_scores_equal_values_worked_out_by_hand(micro: int) -> None:
    """Two of three a are right, b is wrong, c is right; d has no sample."""
    # 7 of 10 for one class, 1 of 10 for each of the others
    logits = math.log(7.0) * F.one_hot(torch.tensor([0, 0, 1, 2, 2]), 4)
    result = scores(Table(), logits, [0, 0, 0, 1, 2], micro)
    assert result.count == 5
    assert result["top1"] == 3 / 5
    assert result["top5"] == 1.0
    assert result["loss"] == pytest.approx((3 * math.log(10 / 7) + 2 * math.log(10)) / 5, rel=1e-6)
    assert [result.per_class[name] for name in "abc"] == [2 / 3, 0.0, 1.0]
    assert math.isnan(result.per_class["d"])
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["per_class"]["d"] is None


@pytest.mark.parametrize("count", [1, 64])
def test_an_evaluation_is_the_same_for_every_world_size(count: int) -> None:
    """To the bit, also a sum of fractions."""
    few = runs.few_digits(small_config().data)
    val = Arrays(few.val.images.float() / 255, few.val.labels, count)
    loader = ArrayLoader(val, PLAIN, CPU, seed=0)
    config = Config().replace(eval_batch_size=5)

    def measure(model: nn.Module, batch: Any) -> Measures:
        logits = model(batch[0])
        fractions = torch.cat([logits.double() ** power for power in (3, -3)]).sum(0)
        return {**CLASSIFY.evaluate(model, batch), "fractions": Total(fractions)}

    def on_rank(world: World) -> Scores:
        model = own_generator(runs.batch_norm(10))
        return evaluate(config, CPU, CLASSIFY, Measuring(measure), model, loader, world)

    alone = on_rank(LocalWorld())
    assert alone.count == count
    for size in (2, 3, 4):
        for each in run_ranks(size, on_rank):
            assert (each.count, each.figures) == (alone.count, alone.figures)
            assert torch.equal(each.total("fractions"), alone.total("fractions"))
            np.testing.assert_equal(each.per_class, alone.per_class)


def test_evaluation_leaves_each_layer_in_its_mode() -> None:
    """A frozen batch norm must not start to learn statistics."""
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2), nn.Dropout()).train()
    model[1].eval()
    scores(model, torch.rand(3, 2), [0, 1, 0])
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_small_losses_count_next_to_a_large_one() -> None:
    """Next to a loss of 2^24, float32 would round each loss of log 2 away."""
    large = 2.0**24
    count = 100
    logits = torch.zeros(1 + count, 2)
    logits[0, 1] = large
    found = scores(Table(), logits, [0] * (1 + count), micro=1)
    assert found["loss"] * (1 + count) - large == pytest.approx(count * math.log(2.0), rel=1e-6)
