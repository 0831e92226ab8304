"""Every built-in task on ranks that are threads, stopped and resumed, and evaluated: the numbers are those of one."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hvd_train.run import evaluate
from hvd_train.validate import Scores
from hvd_train.world.world import LocalWorld, World
from tests.support.runs import equal, largest_difference
from tests.support.task_runs import CASES, NUM_VAL, Case, StopsAfter, on_ranks, teacher_weights

pytestmark = pytest.mark.numeric

TOLERANCE = 1e-5
FIGURES = {
    "classification": ["loss", "top1", "top5"],
    "multi-label": ["loss", "label_accuracy", "map"],
    "regression of a number": ["loss", "mae", "rmse", "r2"],
    "regression of three": ["loss", "mae", "rmse", "r2"],
    "segmentation": ["loss", "pixel_accuracy", "miou"],
    "language-model": ["loss", "perplexity", "token_accuracy"],
    "distillation": ["loss", "top1", "top5"],
}


@pytest.fixture(autouse=True)
def _teacher() -> None:
    teacher_weights()


@pytest.mark.parametrize("name", CASES)
def test_ranks_and_one(name: str) -> None:
    """Two and three ranks train as one does, to the weights and the figures of evaluations."""
    case = CASES[name]
    alone, expected = case.trained(LocalWorld(), "alone")
    assert (alone.steps, alone.finished, list(alone.scores)) == (8, True, FIGURES[name])
    for size in (2, 3):
        ranks = on_ranks(size, functools.partial(case.trained, folder=f"on-{size}"))
        assert all(equal(weights, ranks[0][1]) for _, weights in ranks), "ranks hold different bits"
        for result, weights in ranks:
            assert largest_difference(weights, expected) <= TOLERANCE
            assert result.scores == pytest.approx(alone.scores, abs=TOLERANCE)
            assert result.best == pytest.approx(alone.best, abs=TOLERANCE)
            assert result.best_epoch == alone.best_epoch


@pytest.mark.parametrize("name", CASES)
def test_data_in_memory_and_item_by_item(name: str) -> None:
    """A map-style data set of the same samples trains to the same bits as tensors in memory, on two ranks too."""
    case = CASES[name]
    _, expected = case.trained(LocalWorld(), "in-memory")
    _, weights = case.trained(LocalWorld(), "items", items=True)
    assert equal(weights, expected)
    (_, first), (_, second) = on_ranks(2, lambda world: case.trained(world, "ranks", items=True))
    assert equal(first, second)
    assert largest_difference(first, expected) <= TOLERANCE


@pytest.mark.slow
def test_a_loader_process_changes_nothing() -> None:
    """Targets that are fractions arrive as such from another process."""
    case = CASES["regression of a number"]
    _, expected = case.trained(LocalWorld(), "in-memory")
    _, weights = case.trained(LocalWorld(), "process", items=True, workers=1)
    assert equal(weights, expected)


@pytest.mark.parametrize(
    ("name", "items"), [*((name, False) for name in CASES), ("regression of a number", True), ("language-model", True)]
)
def test_stopped_and_resumed(name: str, items: bool) -> None:
    """A run stopped in the middle of both epochs and resumed has the bits and the journal of one never stopped."""
    case = CASES[name]
    undisturbed, expected = case.trained(LocalWorld(), "undisturbed", items=items)
    for stop, done in ((2, 2), (4, 6)):
        result, _ = case.trained(StopsAfter(stop), "stopped", items=items)
        assert (result.finished, result.steps) == (False, done)
    result, weights = case.trained(LocalWorld(), "stopped", items=items)
    assert equal(weights, expected)
    assert (result.scores, result.best, result.best_epoch) == (
        undisturbed.scores,
        undisturbed.best,
        undisturbed.best_epoch,
    )
    assert _written("stopped") == _written("undisturbed")
    best = [torch.load(Path(folder) / "model-best.pt", weights_only=True) for folder in ("stopped", "undisturbed")]
    assert equal(*best)


def _written(folder: str) -> list[dict[str, object]]:
    """Return the steps and epochs in metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    clock = ("time", "images_per_second", "split", "ranks", "seconds", "usage")
    return [{k: v for k, v in line.items() if k not in clock} for line in lines if line["kind"] != "event"]


@pytest.mark.parametrize("name", CASES)
def test_an_evaluation_is_the_same_on_any_number_of_ranks(name: str) -> None:
    """All figures of a run, those of each class too, and the number of samples, on one to three ranks."""
    case = CASES[name]
    case.trained(LocalWorld(), "run")
    alone = _evaluated(case, LocalWorld())
    assert (list(alone.values), alone.count) == (FIGURES[name], NUM_VAL)
    for size in (2, 3):
        for scores in on_ranks(size, lambda world: _evaluated(case, world)):
            assert scores.count == alone.count
            assert scores.values == pytest.approx(alone.values, rel=1e-12)
            assert list(scores.per_class) == list(alone.per_class) == list(case.classes)
            found, expected = (np.array([*each.per_class.values()]) for each in (scores, alone))
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def _evaluated(case: Case, world: World) -> Scores:
    return evaluate(Path("run"), model=case.model, data=case.data(items=False), world=world)
