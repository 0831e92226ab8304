"""Trainings that have so much time: in all, or in one start."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_train import checkpoint
from hvd_train.config import Config
from hvd_train.job import Clocks
from hvd_train.progress.clock import Lap, Timer
from hvd_train.run_files import run_folder
from hvd_train.world.world import LocalWorld
from tests.support.elastic import Hosts, run_elastic
from tests.support.fault_plays import ONE, THREE, TWO
from tests.support.runs import NUM_SAMPLES, equal, small_config, trained
from tests.support.worlds import StoppingWorld, run_ranks
from tests.unit.story.test_training_end import records, with_a_test_set

EVALUATION_S = 100.0


class Clock:
    """Says what time it is for one rank: a step takes a second, and so does nothing else but an evaluation."""

    def __init__(self) -> None:
        self.now = 0.0

    def model(self, num_classes: int) -> nn.Module:
        """A network that moves the clock on."""
        clock = self

        class Ticks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Linear(64, num_classes)

            def forward(self, images: Tensor) -> Tensor:
                if self.training:
                    clock.now += 1.0
                elif clock.now:  # it is tried out before the first step
                    clock.now += EVALUATION_S
                logits: Tensor = self.body(images.flatten(1))
                return logits

        return Ticks()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all limits."""
    shared = Clock()

    def clocks(config: Config) -> Clocks:
        timers = Timer(None), Timer(config.run.max_seconds, lambda: shared.now)
        return Clocks(*timers, lap=Lap(lambda: shared.now))

    monkeypatch.setattr(Clocks, "of", clocks)
    return shared


def summary(folder: str = "run") -> dict[str, Any]:
    """How the run says that it has ended."""
    values: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    return values


def epochs() -> list[dict[str, Any]]:
    """The records of epochs."""
    return records("epoch")


def config(**changes: Any) -> Config:
    """Ten steps an epoch, one pass each."""
    return small_config(batch_size=20, **changes)


def test_a_run_ends_when_its_total_time_is_over(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """In mid epoch it is finished all the same: summary, last weights with their own scores, test of the best ones."""
    result, weights = trained(LocalWorld(), config(total_time="113"), clock.model, with_a_test_set)
    assert (result.finished, result.steps, result.epochs) == (True, 14, 1)
    found = summary()
    assert found["finished"] is True
    assert (found["epochs"], found["epoch_share"]) == (1, pytest.approx(4 * 20 / NUM_SAMPLES))
    assert found["best_epoch"] == 1
    assert (found["test_loss"], found["best_top1"]) == pytest.approx((epochs()[0]["val_loss"], epochs()[0]["val_top1"]))
    assert found["loss"] != epochs()[0]["val_loss"], "these are to be the scores of the last weights"
    assert equal(torch.load("run/model-final.pt", weights_only=True), weights)
    assert len(epochs()) == 1
    told = capsys.readouterr().out
    assert "its total time (--total-time 113) is over after 1.4" in told
    assert "test top-1" in told


def test_the_total_time_of_an_epoch_that_is_just_done(clock: Clock) -> None:
    """The epoch counts as whole, with its evaluation."""
    result, _ = trained(LocalWorld(), config(total_time="9"), clock.model)
    assert (result.finished, result.steps, result.epochs, result.epoch_share) == (True, 10, 1, 0.0)
    assert [record["seconds"] for record in epochs()] == [10 + EVALUATION_S]


def test_total_time_counts_over_starts(clock: Clock) -> None:
    """A resumed run has what is left, and says what it has spent; with more time it goes on as if never stopped."""
    short = config(total_time="14", epochs=2, eval_epochs=100, schedule="constant", warmup_epochs=0.0)
    stopped, _ = trained(StoppingWorld(6), short, clock.model)
    assert (stopped.finished, stopped.steps, stopped.total_seconds) == (False, 6, 6.0)
    clock.now += 1000  # between the starts
    result, _ = trained(LocalWorld(), short, clock.model)
    assert (result.finished, result.steps, result.total_seconds) == (True, 15, 15.0)
    again, _ = trained(LocalWorld(), short, clock.model)
    assert (again.finished, again.steps) == (True, 15), "nothing more is to be trained"
    longer = short.replace(total_time="1h")
    result, weights = trained(LocalWorld(), longer, clock.model)
    assert (result.finished, result.steps, result.why) == (True, 20, "done")
    _, straight = trained(LocalWorld(), longer.replace(output_dir=Path("straight")), clock.model)
    assert equal(weights, straight)
    assert [record["seconds"] for record in epochs()] == [
        10.0,
        10.0 + EVALUATION_S,
    ]  # the last one is evaluated


def test_all_ranks_end_after_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clocks differ: the first whose time is over ends it for all."""
    rates = iter((1.0, 2.0, 3.0))

    def clocks(config: Config) -> Clocks:
        return Clocks(Timer(None), Timer(None), lap=Lap(partial(next, count(0.0, next(rates)))))

    monkeypatch.setattr(Clocks, "of", clocks)
    results = [result for result, _ in run_ranks(3, lambda world: trained(world, config(total_time="60")))]
    assert len({result.steps for result in results}) == 1
    assert all(result.finished and result.why.startswith("its total time") for result in results)
    assert 60 / 3 / 2 < results[0].steps < 60 / 3


def test_a_limit_of_one_start_leaves_the_files_of_an_end(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Summary, last weights and test; yet the run has not ended, and the same command goes on."""
    limited = config(epochs=2, max_time="113")
    result, weights = trained(LocalWorld(), limited, clock.model, with_a_test_set)
    assert (result.finished, result.stopped_by, result.saved, result.steps) == (False, None, True, 14)
    found = summary()
    assert (found["finished"], found["best_epoch"]) == (False, 1)
    assert found["test_loss"] == pytest.approx(epochs()[0]["val_loss"])
    assert equal(torch.load("run/model-final.pt", weights_only=True), weights)
    assert not run_folder.has_ended(Path("run"))
    told = capsys.readouterr().out
    assert "stopped by its time limit (--max-time 113) at step 14, committed" in told
    assert "the best weights so far: test loss" in told
    result, _ = trained(StoppingWorld(2), limited, clock.model, with_a_test_set)
    assert not Path("run/summary.json").exists(), "the run goes on: it has no end any more"
    result, _ = trained(LocalWorld(), limited.replace(max_time=None), clock.model, with_a_test_set)
    assert (result.finished, result.steps) == (True, 20)
    assert summary()["finished"] is True


def test_a_signal_leaves_at_once(clock: Clock) -> None:
    """Whoever sends one may not wait for an evaluation: there is a commit, and no summary."""
    trained(StoppingWorld(5), config(), clock.model, with_a_test_set)
    assert [path.name for path in checkpoint.committed(Path("run"))] == ["step-0000000005.ckpt"]
    assert not Path("run/summary.json").exists()
    assert not Path("run/model-final.pt").exists()


def test_newcomers_do_not_bring_the_time_of_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process spends before it has the state is no training of the run, even where it is rank 0 at last."""

    def clocks(config: Config) -> Clocks:
        started = count(0.0, 1.0)
        lap = Lap(partial(next, started))
        for _ in range(1000):
            next(started)
        return Clocks(Timer(None), Timer(None), lap=lap)

    monkeypatch.setattr(Clocks, "of", clocks)
    events = [Hosts(4, (TWO, THREE)), Hosts(9, (THREE,))]
    job = run_elastic(lambda world: trained(world, config(epochs=2)), dict((ONE, TWO)), events, first=2)
    ((result, _),) = job.results
    assert result.finished
    assert 20 < result.total_seconds < 1000


def test_a_run_of_so_many_steps(clock: Clock) -> None:
    """It ends after them, also in mid epoch, and goes on with more of them as if it had never ended."""
    short = config(max_steps=4, schedule="constant", warmup_epochs=0.0, epochs=1)
    result, _ = trained(StoppingWorld(2), short, clock.model, with_a_test_set)
    assert (result.finished, result.steps) == (False, 2)
    result, weights = trained(LocalWorld(), short, clock.model, with_a_test_set)
    assert (result.finished, result.steps, result.epochs) == (True, 4, 0)
    assert result.why == "its steps (--max-steps 4) are done"
    assert result.scores["loss"] == pytest.approx(result.test["loss"])
    assert equal(torch.load("run/model-best.pt", weights_only=True), weights), "there are no better ones"
    again, _ = trained(LocalWorld(), short, clock.model, with_a_test_set)
    assert (again.finished, again.steps) == (True, 4)
    _, weights = trained(LocalWorld(), short.replace(max_steps=None), clock.model, with_a_test_set)
    straight = short.replace(max_steps=None, output_dir=Path("straight"))
    assert equal(weights, trained(LocalWorld(), straight, clock.model, with_a_test_set)[1])


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_trial_takes_a_few_steps_and_leaves_every_file(ranks: int) -> None:
    """On any number of ranks: three steps, a part of each evaluation, and a run of its own."""
    trial = config(trial=True, eval_batch_size=7, ledger=True, output_dir=None)
    for result, _ in run_ranks(ranks, lambda world: trained(world, trial, data=with_a_test_set)):
        assert (result.finished, result.steps, result.why) == (True, 3, "its trial is over")
        right = result.test["top1"] * 3 * 7
        assert right == pytest.approx(round(right)), "the evaluation has 21 samples"
    (folder,) = Path("runs").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "summary.json", "metrics.jsonl", "model-best.pt", "model-final.pt", "ledger.jsonl"} <= names
    assert trained(LocalWorld(), trial.replace(trial=False, epochs=1))[0].run_dir != folder


def test_a_trial_of_more_steps() -> None:
    """As many as are typed, over the ends of epochs."""
    result, _ = trained(LocalWorld(), config(trial=True, max_steps=12))
    assert (result.steps, result.epochs) == (12, 1)
