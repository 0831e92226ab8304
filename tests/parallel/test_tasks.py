"""Tasks other than classification, on the ranks that the launcher has started and on one of them alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hvd_train.run import evaluate
from hvd_train.world.world import LocalWorld, World
from tests.support.runs import equal, largest_difference
from tests.support.task_runs import CASES

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _arithmetic_alike() -> None:
    """One thread on every rank: the sums inside an operation are then the same in both runs."""
    torch.set_num_threads(1)


@pytest.mark.parallel
@pytest.mark.parametrize("name", ["regression of three", "language-model"])
def test_ranks_and_one(world: World, name: str) -> None:
    """N ranks train as one rank does, and measure the same in evaluations."""
    case = CASES[name]
    alone, expected = case.trained(LocalWorld(), "alone")
    result, weights = case.trained(world, "ranks")
    assert alone.steps == result.steps == 8
    assert largest_difference(weights, expected) <= TOLERANCE
    assert all(equal(weights, other) for other in world.gather(weights)), "ranks hold different bits"
    assert result.scores == pytest.approx(alone.scores, abs=TOLERANCE)
    assert result.best_epoch == alone.best_epoch


@pytest.mark.parallel
def test_what_is_kept_of_each_sample_comes_from_all_ranks(world: World) -> None:
    """Mean average precision, which no sum of the ranks' own gives, is that of one rank."""
    case = CASES["multi-label"]
    case.trained(world, "ranks")
    folder = Path(world.broadcast(str(Path("ranks").resolve()), 0))
    found = evaluate(folder, model=case.model, data=case.data(items=False), world=world)
    alone = evaluate(folder, model=case.model, data=case.data(items=False), world=LocalWorld())
    assert found.values == pytest.approx(alone.values, rel=1e-12)
    assert found.count == alone.count
