"""The start and the end of a training: its files, and the reports to user, ranks and driver."""

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from hvd_train import checkpoint, run
from hvd_train.config import DataConfig
from hvd_train.data.dataset import DataSet
from hvd_train.errors import FaultRepeats, RankLost, UsageError
from hvd_train.launch import exit_report
from hvd_train.progress.order import EpochOrder
from hvd_train.progress.stop import StopSignal
from hvd_train.run_files import ledger, run_folder
from hvd_train.run_files.durable import AppendedFile
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
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import Fault, Killed, ThreadWorld, run_ranks

T = TypeVar("T")
Report = tuple[type[Exception], str, int]


def newest() -> dict[str, Any]:
    return checkpoint.read(checkpoint.committed(Path("run"))[0])


def with_a_test_set(config: DataConfig) -> DataSet:
    few = runs.few_digits(config)
    return replace(few, test=few.val)


def signal_ranks(monkeypatch: pytest.MonkeyPatch, is_due: Callable[[str], bool]) -> None:
    """Send SIGTERM before the first step to the ranks whose thread names match."""

    class Signalled(StopSignal):
        @override
        def __enter__(self) -> StopSignal:
            self.received = 15 if is_due(threading.current_thread().name) else None
            return self

    monkeypatch.setattr(run, "StopSignal", Signalled)


class Leaves(LocalWorld):
    """A world that this process leaves by an error before the first rendezvous."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    @override
    def meet(self, sync: Callable[[], None] = lambda: None, after: RankLost | None = None) -> None:
        raise self._error


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """Return the reports to the driver: kind of error, what was being done, finished steps."""
    sent: list[Report] = []

    def send(
        environ: Mapping[str, str], error: Exception, during: str = "building", step: int = 0
    ) -> bool:
        sent.append((type(error), during, step))
        return False

    monkeypatch.setattr(exit_report, "send", send)
    return sent


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_weights_are_tested_at_the_end(
    ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the validation set, so that the best scores must come out again."""
    config = small_config(best_by="loss", learning_rate=0.5, schedule="constant", epochs=4)
    results = run_ranks(ranks, lambda world: trained(world, config, data=with_a_test_set))
    epochs = records("epoch")
    best = min(epochs, key=lambda record: record["val_loss"])
    assert best is not epochs[-1]
    for result, weights in results:
        assert result.best_epoch == best["epoch"]
        assert result.test["loss"] == pytest.approx(best["val_loss"], abs=1e-6)
        assert result.test["top1"] == pytest.approx(best["val_top1"])
        assert equal(weights, torch.load("run/model-final.pt", weights_only=True))
    assert f"test loss {best['val_loss']:.4f}, test top-1" in capsys.readouterr().out
    assert json.loads(Path("run/summary.json").read_text())["test_top1"] == pytest.approx(
        best["val_top1"]
    )


def test_all_ranks_know_which_signal_stopped_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are not the final ones, so they are not tested."""
    signal_ranks(monkeypatch, lambda name: name == "rank-1")
    results = run_ranks(2, lambda world: trained(world, small_config(), data=with_a_test_set)[0])
    assert [(result.finished, result.stopped_by, result.saved) for result in results] == [
        (False, 15, True)
    ] * 2
    assert not any(result.test for result in results)
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


def test_a_stop_is_not_called_committed_if_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "write_into", full_disk)
    signal_ranks(monkeypatch, lambda name: True)
    results = run_ranks(2, lambda world: trained(world, small_config())[0])
    assert [(result.finished, result.stopped_by, result.saved) for result in results] == [
        (False, 15, False)
    ] * 2


@pytest.mark.parametrize("what", [checkpoint.FINAL, run_folder.SUMMARY, ledger.LEDGER])
def test_a_run_whose_final_files_are_not_on_disk_is_not_finished(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks know it, and the same command finishes the run when there is room."""
    writing = RunFolder.writing
    appending = AppendedFile.write

    def fails(folder: RunFolder, name: str) -> AbstractContextManager[BinaryIO]:
        if name == what:
            full_disk()
        return writing(folder, name)

    def does_not_fit(file: AppendedFile, entry: bytes) -> bool:
        return not (what == ledger.LEDGER and b"fingerprint" in entry) and appending(file, entry)

    config = small_config(epochs=1, ledger=True, output_dir=None)
    with monkeypatch.context() as disk:
        disk.setattr(RunFolder, "writing", fails)
        disk.setattr(AppendedFile, "write", does_not_fit)
        results = run_ranks(2, lambda world: trained(world, config)[0])
    assert [(result.finished, result.saved) for result in results] == [(True, False)] * 2
    (folder,) = Path("runs").iterdir()
    assert not (folder / run_folder.SUMMARY).exists()
    result, _ = trained(LocalWorld(), config)
    assert (result.saved, result.steps, result.run_dir) == (True, 10, folder)
    assert (folder / run_folder.SUMMARY).exists()
    assert ledger.audit(folder).faults == ()


@pytest.mark.parametrize("file", [f"checkpoints/step-{STEPS:010}.ckpt", checkpoint.FINAL])
def test_a_rank_that_dies_in_the_last_write_is_replaced(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = RunFolder.writing
    deaths = [Killed("while it writes")]

    def dies_once(folder: RunFolder, name: str) -> AbstractContextManager[BinaryIO]:
        if name == file and deaths:
            raise deaths.pop()
        return writing(folder, name)

    monkeypatch.setattr(RunFolder, "writing", dies_once)
    job, folder = play([], ONE, TWO, THREE, most=3)
    check(job, folder, undisturbed())
    assert not deaths
    assert job.sizes[1] == 2
    # a replacement that comes when all is done repeats it from the folder
    assert len(job.results) in (2, 3)
    assert all(result.finished and result.saved for result, _ in job.results)
    assert checkpoint.committed(folder)[0] == checkpoint.path_of(folder, STEPS)
    assert (folder / "summary.json").exists()


class LateUnreadable(runs.Jittered):
    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if 185 <= index < 189:
            raise UsageError(f"cannot read sample {index}")
        return super().__getitem__(index)


def test_the_steps_before_an_error_of_the_data_are_committed(reports: list[Report]) -> None:
    """The report names the rank and the step of the error."""
    order = EpochOrder(0, 0, 190)[0:190]
    bad = np.flatnonzero((order >= 185) & (order < 189))
    whole = int(bad[0]) // 20
    data = LateUnreadable(190, jitter=False), runs.Jittered(20, jitter=False)
    with pytest.raises(UsageError, match="cannot read sample 1") as error:
        trained(LocalWorld(), small_config(epochs=1), data=lambda _: data)
    assert newest()["progress"]["step"] == whole
    assert error.value.raised_by == 0
    assert reports == [(UsageError, "training", whole)]


@pytest.mark.parametrize(
    ("where", "committed"), [("in a step", [2]), ("after it", [3]), ("in its update", [])]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_in_the_users_loop_is_raised_after_a_commit(
    ranks: int, where: str, committed: list[int]
) -> None:
    """Unless the third step may have changed some weights."""

    def body(world: ThreadWorld) -> None:
        def fail(place: str, step: int) -> None:
            if (world.place.rank, place, step) == (0, where, 3):
                raise ZeroDivisionError

        def program(session: Session, model: nn.Module, *_: object) -> None:
            session.before_update(
                lambda _: fail("in its update", session._ranks.state.progress.step + 1)
            )
            for step in session.steps():
                for micro in step:
                    micro.backward(
                        F.cross_entropy(model(micro.batch[0]), micro.batch[1], reduction="none")
                    )
                    fail("in a step", step.number)
                fail("after it", step.number)

        programs.played(world, program, Path("run"))

    with pytest.raises(ZeroDivisionError):
        run_ranks(ranks, body)
    assert [path.name for path in checkpoint.committed(Path("run"))] == [
        f"step-{step:010}.ckpt" for step in committed
    ]


def test_a_killed_loader_process_ends_the_training_with_a_commit() -> None:
    config = small_config(workers=1, epochs=1)
    with pytest.raises(UsageError, match=r"a loader process was killed .* --workers"):
        trained(LocalWorld(), config, data=runs.killed_digits)
    assert newest()["progress"]["step"] > 0


def test_an_error_before_the_first_step_leaves_nothing(reports: list[Report]) -> None:
    """Unusable settings, or a process that never connects, make no run folder."""
    with pytest.raises(UsageError, match="larger than the training set"):
        trained(LocalWorld(), small_config(global_batch_size=1000))
    with pytest.raises(UsageError, match="no network"):
        trained(Leaves(UsageError("no network")), small_config())
    assert reports == [(UsageError, "rendezvous", 0), (UsageError, "building", 0)]
    with pytest.raises(RankLost, match=r"^no route to host$"):
        trained(Leaves(RankLost("no route to host")), small_config())
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

    with pytest.raises(
        FaultRepeats, match="step 3 has failed 5 times in a row; the last time: switch on fire"
    ):
        run_elastic(
            lambda world: trained(world, small_config(epochs=1)),
            {"h1": 1},
            first=1,
            most=1,
            kind=Breaks,
        )
    assert newest()["progress"]["step"] == 2
    assert reports == [(FaultRepeats, "training", 2)]
