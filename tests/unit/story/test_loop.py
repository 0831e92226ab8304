"""The training loop: logs, commits, time limits, bad losses and early stopping."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvd_train import membership
from hvd_train.checkpoint import Store
from hvd_train.errors import UsageError
from hvd_train.progress.clock import TrainingClock
from hvd_train.run import evaluate
from hvd_train.tasks.task import goal_of
from hvd_train.world.world import LocalWorld
from tests.support import programs, runs
from tests.support.launching import records
from tests.support.programs import check_alike, losses, measure
from tests.support.runs import NUM_SAMPLES, equal, small_config, trained
from tests.support.worlds import StoppingWorld


def column(kind: str, name: str) -> list[Any]:
    """Return a value of each record."""
    return [record[name] for record in records(kind)]


def linear(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


@pytest.mark.parametrize(
    "optimizer_of",
    [
        # torch's fused optimizers begin momentum with uninitialised memory
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    ],
    ids=["fused sgd", "adamw"],
)
def test_a_step_that_is_not_finite_changes_nothing(optimizer_of: Any) -> None:
    """Weights, statistics, optimizer and moving average stay, from the first step on; the
    step is counted and reported.
    """

    def program(session, model, optimizer, stop):
        after = session.evaluate(programs.DATA, measure, name="first")["loss"]
        for step in session.steps():
            is_bad = step.number in (1, 4)
            state = copy.deepcopy(optimizer.state_dict())
            for micro in step:
                loss = losses(model, micro.batch)
                micro.backward(loss * math.nan if is_bad and micro.number == 1 else loss)
            before = after
            after = session.evaluate(programs.DATA, measure)["loss"]
            assert (step.skipped, after == before) == (is_bad, is_bad)
            if is_bad:
                check_alike(optimizer.state_dict(), state, allowed=0.0)

    programs.played(
        LocalWorld(),
        program,
        make=lambda: nn.Sequential(programs.linear(), nn.BatchNorm1d(3)),
        optimizer_of=optimizer_of,
        ema_decay=0.9,
    )
    assert column("step", "skipped_steps") == [1, 1, 1, *[2] * 7]
    events = [event["message"] for event in records("event") if event["name"] == "skipped"]
    assert events == [f"step {step} is skipped: its loss is not finite" for step in (1, 4)]
    assert math.isfinite(records("epoch")[0]["loss"])


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the committed steps; the disk is too busy for a commit of step 8."""
    steps = []

    def commit(store, state, *, verified):
        assert verified
        steps.append(state.progress.step)
        return state.progress.step != 8

    monkeypatch.setattr(Store, "commit", commit)
    return steps


def test_learning_rate_records_and_commits_follow_the_samples(committed: list[int]) -> None:
    """The rate belongs to the middle of each batch; intervals count the steps of the whole run."""
    config = small_config(
        epochs=2, warmup_epochs=2.0, learning_rate=0.5, log_steps=3, commit_steps=4
    )
    trained(LocalWorld(), config, linear)
    assert column("step", "step") == [3, 6, 9, 12, 15, 18]
    assert column("step", "samples") == [60, 120, 180, 230, 290, 350]
    assert column("step", "epoch") == [1, 1, 1, 2, 2, 2]
    expected = [0.5 * middle / (2 * NUM_SAMPLES) for middle in (50, 110, 170, 220, 280, 340)]
    assert column("step", "learning_rate") == pytest.approx(expected, rel=1e-12)
    assert min(column("step", "gradient_norm")) > 0
    assert committed == [4, 8, 12, 16, 20]


class Ticking(nn.Module):
    """A network with a clock: a training pass takes one second, an evaluation pass a thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.body = linear(10)
        self.now = 0.0

    def forward(self, images: Tensor) -> Tensor:
        self.now += 1.0 if self.training else 1000.0 * (self.now > 0)  # the first pass is a check
        return self.body(images)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    model = Ticking()
    monkeypatch.setattr(
        membership,
        "TrainingClock",
        lambda limit, split: TrainingClock(limit, split, lambda: model.now),
    )
    return model


def test_a_commit_is_due_some_seconds_after_the_one_before(
    ticking: Ticking, committed: list[int]
) -> None:
    """If the disk is too busy, the next step tries again."""
    trained(
        LocalWorld(), small_config(epochs=1, batch_size=20, commit_seconds=3.0), lambda _: ticking
    )
    assert committed == [4, 8, 9]


def test_the_seconds_of_an_epoch_leave_out_pauses(ticking: Ticking) -> None:
    """They include its evaluation; a stop costs the seconds of its last step."""
    config = small_config(epochs=2, batch_size=20)
    trained(StoppingWorld(after=4), config, lambda _: ticking)
    ticking.now += 5000.0
    trained(LocalWorld(), config, lambda _: ticking)
    assert column("epoch", "seconds") == [1009, 1010]
    assert column("epoch", "total_seconds") == [1009, 2019]


def test_a_time_limit_ends_the_run_after_the_current_step(ticking: Ticking) -> None:
    """Its weights are evaluated, in mid epoch, too.

    The time counts over restarts, so that the same command does no more.
    """
    config = small_config(batch_size=20, max_time="1012s")
    trained(StoppingWorld(after=2), config, lambda _: ticking)
    for _ in range(2):
        ticking.now += 5000.0
        result, _ = trained(LocalWorld(), config, lambda _: ticking)
        assert (result.finished, result.why) == (True, "--max-time 1012s reached")
        assert (result.steps, result.epochs) == (14, 1)
        assert json.loads(Path("run/summary.json").read_text())["steps"] == 14
        last = evaluate(Path("run/model-final.pt"), model=lambda _: Ticking(), data=runs.few_digits)
        assert result.scores == last.figures
    events = [event for event in records("event") if event["name"] == "evaluation"]
    assert [event["step"] for event in events] == [10, 14]
    assert events[-1]["val_loss"] == result.scores["loss"]


def test_the_record_of_an_epoch_has_its_means_and_its_scores() -> None:
    """Losses are weighted by samples; the last epoch is always evaluated."""
    result, _ = trained(LocalWorld(), small_config(epochs=3, eval_epochs=2), linear)
    epochs = records("epoch")
    losses = np.array(column("step", "loss")).reshape(3, 10)
    means = (losses * np.array([20] * 9 + [10])).sum(1) / NUM_SAMPLES
    assert column("epoch", "loss") == pytest.approx(means.tolist(), rel=1e-12)
    assert column("epoch", "step") == [10, 20, 30]
    assert result.peak_memory_gib >= epochs[-1]["peak_memory_gib"] > 0
    assert ["val_loss" not in record for record in epochs] == [True, False, False]
    for name in ("loss", "top1", "top5"):
        assert epochs[-1][f"val_{name}"] == result.scores[name]


def test_an_equal_evaluation_is_not_better() -> None:
    """By top-1 or by loss; NaN is never better, and any number is better than NaN."""
    top1 = goal_of(runs.CLASSIFY, None, "")
    loss = goal_of(runs.CLASSIFY, "loss", "")
    assert [top1.better(value, 0.5) for value in (0.6, 0.5, 0.4)] == [True, False, False]
    assert [loss.better(value, 1.0) for value in (0.9, 1.0, math.nan)] == [True, False, False]
    assert loss.better(5.0, math.nan)


def test_the_target_ends_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The same command has nothing more to do; a target needs a validation set."""
    config = small_config(epochs=30, target="top1=0.6")
    result, weights = trained(LocalWorld(), config)
    assert result.finished
    reached = [score >= 0.6 for score in column("epoch", "val_top1")]
    assert reached == [False] * (result.epochs - 1) + [True]
    assert "target top1 0.6 reached: top-1" in capsys.readouterr().out
    again, same = trained(LocalWorld(), config)
    assert (again.steps, again.finished) == (result.steps, True)
    assert equal(weights, same)
    with pytest.raises(UsageError, match="need a validation set"):
        trained(LocalWorld(), config, data=lambda _: (runs.Jittered(100, jitter=False), None))


def test_patience_ends_a_run() -> None:
    result, _ = trained(LocalWorld(), small_config(epochs=30, patience=3, learning_rate=1e-12))
    assert (result.finished, result.epochs, result.best_epoch) == (True, 4, 1)
    assert result.why == "nothing better since epoch 1"
