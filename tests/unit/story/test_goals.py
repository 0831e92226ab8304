"""When a training ends before its last epoch, and which evaluation is the best."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hvd_train import goals
from hvd_train.errors import UsageError
from hvd_train.settings.schedule import ScheduleConfig
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.runs import equal, small_config, trained
from tests.support.tasks import meter_of_classes


def records(kind: str, run: str = "run") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of a kind."""
    lines = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_the_target_accuracy_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    """After the evaluation that reaches it, as a success that says why; the same command has nothing more to do."""
    config = small_config(epochs=30, target_accuracy=0.6)
    result, weights = trained(LocalWorld(), config)
    assert result.finished
    assert result.epochs < 30
    reached = [record["val_top1"] >= 0.6 for record in records("epoch")]
    assert reached == [False] * (result.epochs - 1) + [True]
    assert "target accuracy 60.00% reached: top-1" in capsys.readouterr().out
    again, same = trained(LocalWorld(), config)
    assert (again.steps, again.finished) == (result.steps, True)
    assert equal(weights, same)


def test_patience_ends_it() -> None:
    """A learning rate of nothing brings nothing: the first evaluation stays the best."""
    result, _ = trained(LocalWorld(), small_config(epochs=30, patience=3, learning_rate=1e-12))
    assert (result.finished, result.epochs, result.best_epoch) == (True, 4, 1)
    assert result.why == "nothing better since epoch 1"


def test_aims_need_an_evaluation() -> None:
    """Data without a validation set cannot reach a target: told before the first step."""
    with pytest.raises(UsageError, match="need a validation set"):
        trained(
            LocalWorld(), small_config(target_accuracy=0.9), data=lambda _: (runs.Jittered(100, jitter=False), None)
        )


@pytest.mark.parametrize(
    ("by", "loss", "top1", "better"),
    [
        ("top1", 9.0, 0.6, True), ("top1", 0.1, 0.5, False), ("loss", 0.9, 0.1, True), ("loss", 1.0, 0.9, False),
        ("loss", math.nan, 0.9, False),
    ],
)  # fmt: skip
def test_what_the_best_evaluation_is(by: str, loss: float, top1: float, better: bool) -> None:
    """By top-1 or by loss; equal is not better, and what is not a number never is."""
    figure = goals.deciding(ScheduleConfig(best_by=by), meter_of_classes().task)
    value, of_bad, best, unknown = (
        evaluation[figure.name]
        for evaluation in (
            {"loss": loss, "top1": top1}, {"loss": 5.0, "top1": 0.9}, {"loss": 1.0, "top1": 0.5},
            {"loss": math.nan, "top1": 0.5},
        )
    )  # fmt: skip
    assert figure.is_better(value, best) == better
    assert figure.is_better(of_bad, unknown)
