"""When a training ends before its last epoch, and how it ends: aims that are reached, losses that are not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvd_train import checkpoint, goals
from hvd_train.config import Config, DataConfig, ScheduleConfig
from hvd_train.data.dataset import DataSet
from hvd_train.errors import Diverged, RankLost, UsageError
from hvd_train.progress.order import order_of
from hvd_train.state import Evaluation
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import Fault, ThreadWorld, own_generator, run_ranks


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
    schedule = ScheduleConfig(best_by=by)  # type: ignore[arg-type]
    assert goals.better(schedule, Evaluation(2, loss, top1, 1.0), Evaluation(1, 1.0, 0.5, 1.0)) == better
    assert goals.better(schedule, Evaluation(2, 5.0, 0.9, 1.0), Evaluation(1, math.nan, 0.5, 1.0))


def with_a_test_set(config: DataConfig) -> DataSet:
    """The few digits, with their validation images as a test set."""
    from dataclasses import replace

    few = runs.few_digits(config)
    return replace(few, test=few.val)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_weights_are_tested_at_the_end(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, on a set of its own: here that of validation, so that the best scores must come out again."""
    config = small_config(best_by="loss", learning_rate=0.5, schedule="constant", epochs=4)
    results = run_ranks(ranks, lambda world: trained(world, config, data=with_a_test_set))
    epochs = records("epoch")
    best = min(epochs, key=lambda record: record["val_loss"])
    assert best is not epochs[-1], "this cannot tell the best weights from the last"
    for result, _ in results:
        assert result.best_epoch == best["epoch"]
        assert result.test_loss == pytest.approx(best["val_loss"], abs=1e-6)
        assert result.test_top1 == pytest.approx(best["val_top1"])
    assert f"test loss {best['val_loss']:.4f}, test top-1" in capsys.readouterr().out
    assert json.loads(Path("run/summary.json").read_text())["test_top1"] == pytest.approx(best["val_top1"])


class Poisoned(nn.Module):
    """A network whose loss is not finite in some steps, counted from 1, for the samples in one pixel's light."""

    def __init__(self, bad: Callable[[int], bool], what: str) -> None:
        super().__init__()
        self.body, self.calls, self.bad, self.what = runs.batch_norm(10), 0, bad, what

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images)
        if not self.training:
            return logits
        self.calls += 1
        if not self.bad((self.calls - 1) // 5 + 1):  # 20 images in 5 slots of 4; the last step of an epoch has 3
            return logits
        return logits * math.nan if self.what == "loss" else _Explodes.apply(logits)  # type: ignore[no-any-return,no-untyped-call]


class _Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.inf


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing(what: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, statistics, optimizer and moving average are those of the step before; it is counted."""
    commit = checkpoint.DiskStore.commit
    monkeypatch.setattr(checkpoint.DiskStore, "commit", lambda store, state, **_: commit(store, state, wait=True))
    config = small_config(epochs=1, ema_decay=0.9, optimizer=optimizer, commit_steps=1, keep_checkpoints=100)
    trained(LocalWorld(), config, lambda _: Poisoned(lambda step: step == 4, what))
    states = {}
    for path in checkpoint.committed(Path("run")):
        snapshot = checkpoint.read(path)
        states[snapshot["progress"]["step"]] = snapshot
    for part in ("model", "average"):
        assert equal(states[3][part], states[4][part])
        assert not equal(states[4][part], states[5][part])
    for number, of_parameter in states[3]["optimizer"]["state"].items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(states[4]["optimizer"]["state"][number][name]))
            for name, value in of_parameter.items()
        )
    steps = records("step")
    assert [record["skipped_steps"] for record in steps] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    told = [record["message"] for record in records("event") if record["name"] == "skipped"]
    assert told == (["step 4 is skipped: its loss is not finite"] if what == "loss" else [])
    assert math.isfinite(records("epoch")[0]["loss"]), "one step has spoiled the mean of the epoch"


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_many_in_a_row_end_the_run(ranks: int) -> None:
    """The error names step, ranks and samples, once; the last good state is committed, and weights are finite."""
    config = small_config(epochs=1, max_skipped_steps=3, ledger=True, batch_size=10)
    bad = 6  # from this sample on, as the data set counts

    class OfSamples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = runs.convnet(10)
            self.step = 0

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.body(images)
            if not self.training:
                return logits
            self.step += 1
            # Two slots a step: one rank takes both, or two ranks one each.
            now = (self.step - 1) // (2 if ranks == 1 else 1) + 1
            poison = torch.zeros(len(logits), 1)
            if now >= bad:
                poison[0] = math.inf
            return logits + poison * logits.sign()

    with pytest.raises(Diverged) as told:
        run_ranks(ranks, lambda world: trained(world, config, lambda _: own_generator(OfSamples())))
    lines = [json.loads(line) for line in Path("run/ledger.jsonl").read_text().splitlines()]
    samples = lines[7]["samples"]
    message = str(told.value)
    assert "3 steps in a row were skipped; in the last one, step 8, the loss is not finite" in message
    if ranks == 1:
        assert f"(rank 0: samples {samples[0]}, {samples[10]})" in message
    else:
        assert f"(rank 0: samples {samples[0]}; rank 1: samples {samples[10]})" in message
    newest = checkpoint.newest_good(Path("run"), pytest.fail)
    assert newest is not None
    assert newest["progress"]["step"] == 8
    assert all(bool(value.isfinite().all()) for value in newest["model"].values())


class Unreadable(runs.Jittered):
    """Its last samples cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= 185:
            raise UsageError(f"cannot read sample {index}")
        return super().__getitem__(index)


def test_steps_before_a_sample_that_cannot_be_read_are_done() -> None:
    """The batch that has it is read while the step before it is under way, which is taken all the same."""
    config = small_config(epochs=1, ledger=True, log_steps=1)
    bad = np.flatnonzero(order_of(config.seed, 0, 190, 1)[0:190] >= 185)
    whole = int(bad[0]) // 20
    assert whole > 1
    data = Unreadable(190, jitter=False), runs.Jittered(20, jitter=False)
    with pytest.raises(UsageError, match="cannot read sample 1"):
        trained(LocalWorld(), config, data=lambda _: data)
    entries = [json.loads(line) for line in Path("run/ledger.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, whole + 1))
    assert [record["step"] for record in records("step")] == list(range(1, whole + 1))


def test_the_same_command_again_gives_up_at_once() -> None:
    """A run that has given up does not train on as if nothing had been: one more such step, and it ends again."""
    config = small_config(epochs=1, max_skipped_steps=3)
    for steps in (3, 4):
        with pytest.raises(Diverged):
            trained(LocalWorld(), config, lambda _: Poisoned(lambda step: True, "loss"))
        newest = checkpoint.newest_good(Path("run"), pytest.fail)
        assert newest is not None
        assert newest["progress"]["step"] == steps


def test_a_skip_now_and_then_does_not_add_up() -> None:
    """Only steps in a row count towards giving up."""
    config = small_config(epochs=1, max_skipped_steps=2)
    result, _ = trained(LocalWorld(), config, lambda _: Poisoned(lambda step: step % 2 == 0, "loss"))
    assert result.finished


def test_settings_that_cannot_be() -> None:
    """In one line each."""
    for changes in ({"target_accuracy": 1.5}, {"target_accuracy": 0.0}, {"patience": 0}, {"max_skipped_steps": 0}):
        with pytest.raises(UsageError, match=next(iter(changes)).replace("_", "-")):
            Config().replace(**changes)


@pytest.mark.parametrize(
    ("victim", "told"), [(0, r"step \d is done, and for rank 0 to commit"), (1, r"step \d is committed")]
)
def test_a_lost_rank_ends_what_is_not_elastic(victim: int, told: str) -> None:
    """Who is left says what it knows: that the last step is on disk, or that this was for the one that is gone."""

    def body(world: ThreadWorld) -> None:
        with pytest.raises(RankLost, match=told):
            trained(world, small_config())

    run_ranks(2, body, [Fault(victim, step=3)])
