"""The training loop: logs, commits, time limits, bad losses and early stopping."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hvd_train import checkpoint, membership
from hvd_train.checkpoint import Store
from hvd_train.errors import Diverged, UsageError
from hvd_train.progress.clock import TrainingClock
from hvd_train.run import evaluate
from hvd_train.state import TrainState
from hvd_train.tasks.task import goal_of
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.launching import records
from tests.support.runs import NUM_SAMPLES, equal, small_config, trained
from tests.support.worlds import StoppingWorld, own_generator, run_ranks


def linear(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


class Poisoned(nn.Module):
    """A network whose first loss is not finite in some steps (one
    micro-batch each), counted from 1.
    """

    def __init__(self, bad: Callable[[int], bool]) -> None:
        super().__init__()
        self.body = runs.batch_norm(10)
        self.calls = 0
        self.bad = bad

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images)
        poison = torch.zeros(len(logits), 1)
        if self.training and self.bad(self.calls + 1):
            poison[0] = math.inf
        self.calls += self.training
        return logits + poison * logits.sign()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, statistics, optimizer and moving average stay; the step is counted and reported."""
    monkeypatch.setattr(Store, "commit", lambda store, state: store.commit_last(state).result())
    config = small_config(
        epochs=1, ema_decay=0.9, optimizer=optimizer, commit_steps=1, keep_checkpoints=100
    )
    result, _ = trained(
        LocalWorld(), config.replace(batch_size=20), lambda _: Poisoned(lambda step: step in (4, 6))
    )
    assert result.finished
    states = []
    for step in (3, 4, 5):
        snapshot = checkpoint.read(checkpoint.path_of(Path("run"), step))
        tensors = tree_leaves(
            (snapshot["model"], snapshot["average"], snapshot["optimizers"][""]["state"])
        )
        states.append([torch.as_tensor(tensor) for tensor in tensors])
    assert all(map(torch.equal, states[0], states[1]))
    assert not all(map(torch.equal, states[1], states[2]))
    assert [record["skipped_steps"] for record in records("step")] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2]
    event = next(record for record in records("event") if record["name"] == "skipped")
    assert (event["message"], event["step"]) == ("step 4 is skipped: its loss is not finite", 4)
    assert math.isfinite(records("epoch")[0]["loss"])


def test_too_many_bad_steps_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the step; the last good weights are committed."""
    monkeypatch.setattr("hvd_train.end.MOST_SKIPPED_STEPS", 3)
    config = small_config(epochs=1, ledger=True, batch_size=10)
    for last in (8, 9):
        make = lambda _, last=last: own_generator(Poisoned(lambda step: step >= 6 or last == 9))  # noqa: E731
        with pytest.raises(Diverged) as error:
            run_ranks(2, lambda world, make=make: trained(world, config, make))
        assert (
            f"steps in a row were skipped; in the last one, step {last}, the loss is not finite"
            in str(error.value)
        )
        newest = checkpoint.newest_good(Path("run"), pytest.fail)
        assert newest["progress"]["step"] == last
        assert all(bool(value.isfinite().all()) for value in newest["model"].values())


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the committed steps; the disk is too busy for a commit of step 8."""
    steps = list[int]()

    def commit(store: Store, state: TrainState) -> bool:
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
    steps = records("step")
    assert [record["step"] for record in steps] == [3, 6, 9, 12, 15, 18]
    assert [record["samples"] for record in steps] == [60, 120, 180, 230, 290, 350]
    assert [record["epoch"] for record in steps] == [1, 1, 1, 2, 2, 2]
    expected = [0.5 * middle / (2 * NUM_SAMPLES) for middle in (50, 110, 170, 220, 280, 340)]
    assert [record["learning_rate"] for record in steps] == pytest.approx(expected, rel=1e-12)
    assert all(record["gradient_norm"] > 0 for record in steps)
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
    assert [(record["seconds"], record["total_seconds"]) for record in records("epoch")] == [
        (1009, 1009),
        (1010, 2019),
    ]


def test_a_time_limit_ends_the_run_after_the_current_step(ticking: Ticking) -> None:
    """Its weights are evaluated.

    The time counts over restarts, so that the same command does no more.
    """
    config = small_config(batch_size=20, max_time="3s", eval_epochs=5)
    trained(StoppingWorld(after=2), config, lambda _: ticking)
    best = []
    for _ in range(2):
        ticking.now += 5000.0
        result, _ = trained(LocalWorld(), config, lambda _: ticking)
        assert (result.finished, result.why, result.steps) == (True, "--max-time 3s reached", 5)
        best.append((result.best_epoch, result.best))
        assert json.loads(Path("run/summary.json").read_text())["steps"] == 5
        assert Path("run/model-final.pt").exists()
    assert best[0] == best[1] != (None, {})


def test_a_time_limit_in_mid_epoch_reports_the_last_weights(ticking: Ticking) -> None:
    """Not those of the epoch before, also if the same command is typed again."""
    config = small_config(batch_size=20, max_time="1012s")
    for _ in range(2):
        result, _ = trained(LocalWorld(), config, lambda _: ticking)
        assert (result.steps, result.epochs) == (13, 1)
        last = evaluate(Path("run/model-final.pt"), model=lambda _: Ticking(), data=runs.few_digits)
        assert result.scores == last.figures
    events = [event for event in records("event") if event["name"] == "evaluation"]
    assert [event["step"] for event in events] == [10, 13]
    assert events[-1]["val_loss"] == result.scores["loss"]


def test_the_record_of_an_epoch_has_its_means_and_its_scores() -> None:
    """Losses are weighted by samples; the last epoch is always evaluated."""
    result, _ = trained(LocalWorld(), small_config(epochs=3, eval_epochs=2), linear)
    epochs = records("epoch")
    losses = np.array([record["loss"] for record in records("step")]).reshape(3, 10)
    means = (losses * np.array([20] * 9 + [10])).sum(1) / NUM_SAMPLES
    assert [record["loss"] for record in epochs] == pytest.approx(means.tolist(), rel=1e-12)
    assert [record["step"] for record in epochs] == [10, 20, 30]
    assert result.peak_memory_gib >= epochs[-1]["peak_memory_gib"] > 0
    assert ["val_loss" not in record for record in epochs] == [True, False, False]
    last = [epochs[-1][name] for name in ("val_loss", "val_top1", "val_top5")]
    assert last == [result.scores[name] for name in ("loss", "top1", "top5")]


def test_an_equal_evaluation_is_not_better() -> None:
    """By top-1 or by loss; NaN is never better, and any number is better than NaN."""
    top1 = goal_of(runs.CLASSIFY, None, "")
    loss = goal_of(runs.CLASSIFY, "loss", "")
    assert [top1.better(value, 0.5) for value in (0.6, 0.5, 0.4)] == [True, False, False]
    assert [loss.better(value, 1.0) for value in (0.9, 1.0, math.nan)] == [True, False, False]
    assert loss.better(5.0, math.nan)


def test_the_target_accuracy_ends_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The same command has nothing more to do; a target needs a validation set."""
    config = small_config(epochs=30, target_accuracy=0.6)
    result, weights = trained(LocalWorld(), config)
    assert result.finished
    reached = [record["val_top1"] >= 0.6 for record in records("epoch")]
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
