"""How a training ends: the test of the best weights, and what is said when a rank is lost."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest

from hvd_train import checkpoint, loop, run
from hvd_train.data.dataset import DataSet
from hvd_train.errors import RankLost, ReplicasDiffer
from hvd_train.progress.stop import StopSignal
from hvd_train.run_files.journal import RunJournal
from hvd_train.run_files.records import Ending
from hvd_train.settings.data import DataConfig
from hvd_train.state import TrainState
from hvd_train.world.world import DriverLost, LocalWorld, already_in_sync
from tests.support import runs
from tests.support.elastic import Hosts, run_elastic
from tests.support.runs import small_config, trained
from tests.support.worlds import Fault, Killed, ThreadWorld, run_ranks

T = TypeVar("T")


def records(kind: str, run: str = "run") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of a kind."""
    lines = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


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
        assert result.test["loss"] == pytest.approx(best["val_loss"], abs=1e-6)
        assert result.test["top1"] == pytest.approx(best["val_top1"])
    assert f"test loss {best['val_loss']:.4f}, test top-1" in capsys.readouterr().out
    assert json.loads(Path("run/summary.json").read_text())["test_top1"] == pytest.approx(best["val_top1"])


@pytest.mark.parametrize(
    ("victim", "told"), [(0, r"step \d is done, and for rank 0 to commit"), (1, r"step \d is committed")]
)
def test_a_lost_rank_ends_what_is_not_elastic(victim: int, told: str) -> None:
    """Who is left says what it knows: that the last step is on disk, or that this was for the one that is gone."""

    def body(world: ThreadWorld) -> None:
        with pytest.raises(RankLost, match=told):
            trained(world, small_config())

    run_ranks(2, body, [Fault(victim, step=3)])


def test_a_survivor_of_rank_0_commits_where_nobody_else_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an elastic job whose driver is gone as well the last step is on disk, and the same command goes on from it."""
    in_each_world = ThreadWorld.in_each_world

    def without_driver(world: ThreadWorld, body: Callable[[], Iterable[T]], sync: Callable[[], None]) -> Iterator[T]:
        try:
            yield from in_each_world(world, body, sync)
        except RankLost as error:
            raise DriverLost(str(error)) from error

    monkeypatch.setattr(ThreadWorld, "in_each_world", without_driver)
    config = small_config(commit_steps=100)

    def body(world: ThreadWorld) -> None:
        with pytest.raises(RankLost, match=r"step (\d) is committed in run/checkpoints/step-0{9}\1.ckpt; the same"):
            trained(world, config)

    run_ranks(2, body, [Fault(0, step=3)])
    (commit,) = checkpoint.committed(Path("run"))
    result, _ = trained(LocalWorld(), config)
    assert result.finished
    assert any(event.get("message", "").endswith(f"step {int(commit.stem[-1])}") for event in records("event"))


class Unwanted(LocalWorld):
    """A world that goes on without this process, which a signal has told to end."""

    def in_each_world(self, body: Callable[[], Iterable[T]], sync: Callable[[], None] = already_in_sync) -> Iterator[T]:
        """Come to one state, and leave."""
        sync()
        os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit(0)


def test_a_rank_that_leaves_by_a_signal_commits_and_says_so_in_its_exit_code() -> None:
    """As one whose job is stopped by it."""
    with pytest.raises(SystemExit) as left:
        trained(Unwanted(), small_config())
    assert left.value.code == 128 + signal.SIGTERM
    assert len(checkpoint.committed(Path("run"))) == 1


def test_what_is_trained_is_saved_where_a_newcomer_comes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meeting after which the newcomer holds other weights ends the job, but not before rank 0 has committed."""
    load = TrainState.load_values

    def load_otherwise(state: TrainState, snapshot: dict[str, Any]) -> None:
        load(state, snapshot)
        state.model.get_parameter("4.bias").data += 1

    monkeypatch.setattr(TrainState, "load_values", load_otherwise)
    hosts = Hosts(7, (("h1", 1), ("h2", 1)))
    with pytest.raises(ReplicasDiffer, match=r"rank 1 in 4\.bias; what rank 0 holds is committed"):
        run_elastic(lambda world: trained(world, small_config()), {"h1": 1}, [hosts], first=1)
    (newest,) = checkpoint.committed(Path("run"))
    assert checkpoint.read(newest)["progress"]["step"] >= 7


@pytest.mark.parametrize("dies", [True, False])
def test_a_stop_is_called_committed_by_those_who_know(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 dies within the last commit, or the disk is full, no other rank says that it is on disk."""

    def fails(*_: object) -> None:
        raise Killed("while it commits") if dies else OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", fails)

    class Signalled(StopSignal):
        def __enter__(self) -> StopSignal:
            self.received = 15
            return self

    monkeypatch.setattr(run, "StopSignal", Signalled)

    def body(world: ThreadWorld) -> object:
        if not dies or world.place.rank == 0:
            return trained(world, small_config())[0]
        with pytest.raises(RankLost, match="step 1 is done, and for rank 0 to commit"):
            trained(world, small_config())
        return None

    results = run_ranks(2, body)
    if not dies:
        assert [(result.finished, result.stopped_by, result.saved) for result in results] == [(False, 15, False)] * 2


def test_all_ranks_know_that_the_final_files_are_not_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their exit codes say so, whichever of them the launcher looks at."""

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_weights", fails)
    results = run_ranks(2, lambda world: trained(world, small_config(epochs=1))[0])
    assert [(result.finished, result.saved) for result in results] == [(True, False)] * 2


@pytest.mark.parametrize("error", [None, OSError("broken"), SystemExit(0)])
def test_the_journal_hears_how_the_training_ends(error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished, failed, or stopped where the process is told to end: services show the state of a run."""
    heard = list[Ending]()
    monkeypatch.setattr(RunJournal, "end", lambda self, ending: heard.append(ending))
    if error is None:
        trained(LocalWorld(), small_config(epochs=1))
    else:
        monkeypatch.setattr(loop, "finish_epoch", Mock(side_effect=error))
        with pytest.raises(type(error)):
            trained(LocalWorld(), small_config(epochs=1))
    assert [ending.how for ending in heard] == [
        "finished" if error is None else "failed" if isinstance(error, OSError) else "stopped"
    ]
