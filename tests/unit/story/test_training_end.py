"""The start and the end of a training: its files, and the reports to user, ranks and driver."""

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn
from typing_extensions import override

from hvd_train import checkpoint
from hvd_train.config import DataConfig
from hvd_train.data.dataset import DataSet
from hvd_train.errors import FaultRepeats, RankLost, UsageError
from hvd_train.launch import exit_report
from hvd_train.progress.stop import StopSignal
from hvd_train.run_files import run_folder
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.session import Session
from hvd_train.world.world import Gradients, LocalWorld
from tests.support import programs, runs
from tests.support.elastic import (
    ONE,
    STEPS,
    THREE,
    TWO,
    ElasticThreadWorld,
    check,
    play,
    run_elastic,
    undisturbed,
)
from tests.support.faults import full_disk
from tests.support.launching import records
from tests.support.programs import Stop, losses
from tests.support.runs import equal, small_config, steps_on_disk, trained
from tests.support.worlds import Fault, Killed, ThreadWorld, run_ranks

Report = tuple[type[Exception], str, int]


def with_a_test_set(config: DataConfig) -> DataSet:
    few = runs.few_digits(config)
    return replace(few, test=few.val)


class Unreachable(LocalWorld):
    """A world in which the first rendezvous fails."""

    @override
    def meet(self, sync: Callable[[], None] = lambda: None, after: RankLost | None = None) -> None:
        raise UsageError("no network")


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """Return the reports to the driver: kind of error, what was being done, finished steps."""
    sent = []
    monkeypatch.setattr(
        exit_report,
        "send",
        lambda error, during="building", step=0: sent.append((type(error), during, step)),
    )
    return sent


def test_the_best_weights_are_tested_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """On the validation set, so that the best scores must come out again."""
    config = small_config(best_by="loss", learning_rate=0.5, schedule="constant", epochs=4)
    results = run_ranks(2, lambda world: trained(world, config, data=with_a_test_set))
    best = min(records("epoch"), key=lambda record: record["val_loss"])
    assert best["epoch"] < 4
    for result, weights in results:
        assert result.best_epoch == best["epoch"]
        assert result.test["loss"] == pytest.approx(best["val_loss"], abs=1e-6)
        assert equal(weights, torch.load("run/model-final.pt", weights_only=True))
    assert f"test loss {best['val_loss']:.4f}, test top-1" in capsys.readouterr().out
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["test_top1"] == pytest.approx(best["val_top1"])


def test_all_ranks_know_which_signal_stopped_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are not the final ones, so they are not tested."""

    def enter(stop: StopSignal) -> StopSignal:
        stop.received = 15 if threading.current_thread().name == "rank-1" else None
        return stop

    monkeypatch.setattr(StopSignal, "__enter__", enter)
    for result in run_ranks(
        2, lambda world: trained(world, small_config(), data=with_a_test_set)[0]
    ):
        found = (result.finished, result.stopped_by, result.saved, result.test)
        assert found == (False, 15, True, {})
    assert not Path("run/model-final.pt").exists()
    assert not Path("run/summary.json").exists()


@pytest.mark.parametrize(
    ("victim", "disk", "line"),
    [
        (0, "", r"step \d is done, and for rank 0 to commit"),
        (1, "", r"step \d is committed"),
        (1, "full", r"step \d is NOT committed \(see above\); the same command resumes"),
    ],
)
def test_a_lost_rank_ends_a_static_job(
    victim: int, disk: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if disk:
        monkeypatch.setattr(checkpoint, "write_into", full_disk)

    def body(world: ThreadWorld) -> None:
        with pytest.raises(RankLost, match=line):
            trained(world, small_config())

    run_ranks(2, body, [Fault(victim, step=3)])


def before_writing(name: str, act: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Call `act`, which may raise, before a run writes a file of this name."""
    writing = RunFolder.writing

    def replaced(folder: RunFolder, file: str) -> AbstractContextManager[BinaryIO]:
        if file == name:
            act()
        return writing(folder, file)

    patch.setattr(RunFolder, "writing", replaced)


@pytest.mark.parametrize("name", [checkpoint.FINAL, run_folder.SUMMARY])
def test_a_run_whose_final_files_are_not_on_disk_is_not_finished(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks know it, and the same command finishes the run when there is room."""
    config = small_config(epochs=1, output_dir=None)
    with monkeypatch.context() as disk:
        before_writing(name, full_disk, disk)
        results = run_ranks(2, lambda world: trained(world, config)[0])
    assert [(result.finished, result.saved) for result in results] == [(True, False)] * 2
    (folder,) = Path("runs").iterdir()
    assert not (folder / run_folder.SUMMARY).exists()
    result, _ = trained(LocalWorld(), config)
    assert (result.saved, result.steps, result.run_dir) == (True, 10, folder)
    assert (folder / run_folder.SUMMARY).exists()


@pytest.mark.parametrize("name", [f"checkpoints/step-{STEPS:010}.ckpt", checkpoint.FINAL])
def test_a_rank_that_dies_in_the_last_write_is_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = [Killed("while it writes")]

    def die_once() -> None:
        if deaths:
            raise deaths.pop()

    before_writing(name, die_once, monkeypatch)
    job, folder = play([], ONE, TWO, THREE, most=3)
    check(job, folder, undisturbed())
    assert job.sizes[1] == 2
    # a replacement that comes when all is done repeats it from the folder
    assert len(job.results) in (2, 3)
    assert all(result.finished and result.saved for result, _ in job.results)
    assert checkpoint.committed(folder)[0] == checkpoint.path_of(folder, STEPS)
    assert (folder / "summary.json").exists()


@pytest.mark.parametrize(("where", "committed"), [("in a step", [2]), ("in its update", [])])
def test_an_error_in_the_users_loop_is_raised_after_a_commit(
    where: str, committed: list[int]
) -> None:
    """Unless the third step may have changed some weights."""

    def program(session: Session, model: nn.Module, optimizer: Any, stop: Stop) -> None:
        session.before_update(lambda _: stop(step.number, "in its update"))
        for step in session.steps():
            for micro in step:
                micro.backward(losses(model, micro.batch))
                stop(step.number, "in a step")

    def body(world: ThreadWorld) -> None:
        stop_at = 3 if world.place.rank == 0 else 0
        programs.played(world, program, stop_at=stop_at, stop_in=where)

    with pytest.raises(programs.Interrupted):
        run_ranks(2, body)
    assert steps_on_disk() == committed


def test_an_error_of_the_data_ends_the_training_with_a_commit(reports: list[Report]) -> None:
    """As that of a loader process that is killed."""
    config = small_config(workers=1, epochs=1)
    with pytest.raises(UsageError, match=r"a loader process was killed .* --workers") as error:
        trained(LocalWorld(), config, data=runs.killed_digits)
    (step,) = steps_on_disk()
    assert step > 0
    assert error.value.raised_by == 0
    assert reports == [(UsageError, "training", step)]


def test_an_error_before_the_first_step_leaves_nothing(reports: list[Report]) -> None:
    """Unusable settings, or a process that never connects, make no run folder."""
    with pytest.raises(UsageError, match="larger than the training set"):
        trained(LocalWorld(), small_config(global_batch_size=1000))
    with pytest.raises(UsageError, match="no network"):
        trained(Unreachable(), small_config())
    assert reports == [(UsageError, "rendezvous", 0), (UsageError, "building", 0)]
    assert not Path("run").exists()


def test_a_step_that_never_succeeds_ends_the_job_with_earlier_steps_committed(
    reports: list[Report],
) -> None:
    class Breaks(ElasticThreadWorld):
        @override
        def reduce(self) -> Gradients:
            if self._step == 3:
                raise RankLost("switch on fire")
            return super().reduce()

    says = "step 3 has failed 5 times in a row; the last time: switch on fire"
    body = lambda world: trained(world, small_config(epochs=1))  # noqa: E731
    with pytest.raises(FaultRepeats, match=says):
        run_elastic(body, dict([ONE]), first=1, most=1, kind=Breaks)
    assert steps_on_disk() == [2]
    assert reports == [(FaultRepeats, "training", 2)]
