"""What a process leaves and says when its training ends by an error or a signal: commit, rank, step, exit code."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hvd_train import checkpoint, run
from hvd_train.data import loader
from hvd_train.data.array_loader import ArrayLoader
from hvd_train.elastic.members import RankReport
from hvd_train.errors import Diverged, FaultRepeats, RankLost, UsageError
from hvd_train.launch import last_word
from hvd_train.progress.order import order_of
from hvd_train.progress.stop import StopSignal
from hvd_train.run_files import durable, run_folder
from hvd_train.run_files.durable import Permission
from hvd_train.world.gradient import Gradient
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.elastic import ElasticThreadWorld, run_elastic
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import ThreadWorld, run_ranks
from tests.unit.story.test_loop import Poisoned, Unreadable
from tests.unit.story.test_training_end import records, with_a_test_set

T = TypeVar("T")
Word = tuple[type[Exception], str, int]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[Word]:
    """What the driver of the job would hear: kind of error, what was being done, steps done."""
    heard: list[Word] = []

    def tell(environ: Mapping[str, str], error: Exception, during: str = "building", step: int = 0) -> bool:
        heard.append((type(error), during, step))
        return False

    monkeypatch.setattr(last_word, "tell", tell)
    return heard


def newest() -> int:
    """The step of the newest checkpoint."""
    snapshot = checkpoint.newest_good(Path("run"), pytest.fail)
    assert snapshot is not None
    return int(snapshot["progress"]["step"])


def test_the_steps_before_an_error_of_the_data_are_committed(words: list[Word]) -> None:
    """The user mends the file and goes on from there; driver and other ranks hear whose error it is, and where."""
    bad = np.flatnonzero(order_of(0, 0, 190, 1)[0:190] >= 185)
    whole = int(bad[0]) // 20
    data = Unreadable(190, jitter=False), runs.Jittered(20, jitter=False)
    with pytest.raises(UsageError, match="cannot read sample 1") as told:
        trained(LocalWorld(), small_config(epochs=1), data=lambda _: data)
    assert newest() == whole
    assert told.value.raised_by == 0
    assert words == [(UsageError, "training", whole)]


def test_an_error_before_the_first_step_is_of_all_ranks_and_leaves_nothing(words: list[Word]) -> None:
    """No folder is made for settings that cannot be trained with."""
    with pytest.raises(UsageError, match="larger than the training set") as told:
        trained(LocalWorld(), small_config(global_batch_size=1000))
    assert told.value.raised_by is None
    assert words == [(UsageError, "meeting", 0)]
    assert not Path("run").exists()


def test_a_training_that_diverges_is_no_error_of_one_rank(words: list[Word]) -> None:
    """All ranks find it in the same step."""
    with pytest.raises(Diverged) as told:
        trained(LocalWorld(), small_config(epochs=1, max_skipped_steps=3), lambda _: Poisoned(lambda _: True, "loss"))
    assert told.value.raised_by is None
    assert words == [(Diverged, "training", 3)]


def test_a_step_that_breaks_for_ever_ends_the_job_with_all_other_steps_committed(words: list[Word]) -> None:
    """It is counted over the meetings of the same ranks, and another world would do no better."""

    class Breaks(ElasticThreadWorld):
        """Nobody gets through the reductions of the third step."""

        @override
        @contextmanager
        def reduced(self, optimizer: Optimizer) -> Iterator[Gradient]:
            with super().reduced(optimizer) as gradient:
                if self._step == 3:
                    raise RankLost("switch on fire")
                yield gradient

    with pytest.raises(FaultRepeats, match="step 3 has failed 5 times in a row; the last time: switch on fire"):
        run_elastic(lambda world: trained(world, small_config(epochs=1)), {"h1": 1}, first=1, most=1, kind=Breaks)
    assert newest() == 2
    assert words == [(FaultRepeats, "training", 2)]


def test_a_rank_that_is_lost_before_all_have_met_claims_no_step() -> None:
    """There is nothing to commit, and nothing to be called committed."""

    class Alone(ThreadWorld):
        @override
        def gather(self, value: T) -> list[T]:
            if isinstance(value, RankReport):
                raise RankLost("no route to host")
            return super().gather(value)

    with pytest.raises(RankLost, match=r"^no route to host$"):
        run_ranks(1, lambda world: trained(world, small_config()), kind=Alone)
    assert not Path("run").exists()


def test_all_ranks_say_which_signal_stopped_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their exit codes are alike, whichever of them the launcher looks at."""

    class OnlyRank1(StopSignal):
        @override
        def __enter__(self) -> StopSignal:
            self.received = 15 if threading.current_thread().name == "rank-1" else None
            return self

    monkeypatch.setattr(run, "StopSignal", OnlyRank1)
    results = run_ranks(2, lambda world: trained(world, small_config())[0])
    assert [(result.finished, result.stopped_by, result.saved) for result in results] == [(False, 15, True)] * 2


def test_a_signal_that_comes_after_the_last_step_has_stopped_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training is finished, and its exit code says so."""
    signals: list[StopSignal] = []

    class Kept(StopSignal):
        @override
        def __enter__(self) -> StopSignal:
            signals.append(self)
            return self

    class SignalledInEvaluation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.trained = runs.convnet(10), False

        def forward(self, images: Tensor) -> Tensor:
            self.trained |= self.training
            if self.trained and not self.training:
                signals[0].received = 15
            logits: Tensor = self.body(images)
            return logits

    monkeypatch.setattr(run, "StopSignal", Kept)
    result, _ = trained(LocalWorld(), small_config(epochs=1), lambda _: SignalledInEvaluation())
    assert (result.finished, result.stopped_by, result.saved) == (True, None, True)


def test_all_ranks_know_that_the_summary_is_not_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that writes tells those that do not."""
    write_text = durable.write_text

    def fails(path: Path, text: str, permission: Permission = durable.always) -> None:
        if path.name == run_folder.SUMMARY:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_text(path, text, permission)

    monkeypatch.setattr(durable, "write_text", fails)
    results = run_ranks(2, lambda world: trained(world, small_config(epochs=1))[0])
    assert [(result.finished, result.saved) for result in results] == [(True, False)] * 2


def test_the_test_of_the_best_weights_leaves_the_last_ones() -> None:
    """The model in memory is the one in model-final.pt, though another one was scored."""
    config = small_config(best_by="loss", learning_rate=0.5, schedule="constant", epochs=4)
    result, weights = trained(LocalWorld(), config, data=with_a_test_set)
    assert result.best_epoch != 4, "this cannot tell the best weights from the last"
    assert result.test["loss"] == pytest.approx(min(record["val_loss"] for record in records("epoch")), abs=1e-6)
    assert equal(weights, torch.load("run/model-final.pt", weights_only=True))


def test_a_training_that_is_stopped_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends within the seconds that a batch system gives it, and its weights are not the final ones."""

    class Signalled(StopSignal):
        @override
        def __enter__(self) -> StopSignal:
            self.received = 15
            return self

    monkeypatch.setattr(run, "StopSignal", Signalled)
    result, _ = trained(LocalWorld(), small_config(), data=with_a_test_set)
    assert np.isnan(result.test["top1"])
    assert not Path("run/model-final.pt").exists()
    assert not Path("run/summary.json").exists()


def test_the_loaders_are_closed_however_a_training_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes would outlive it."""
    closed: list[Any] = []

    class Closes(ArrayLoader):
        @override
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(loader, "ArrayLoader", Closes)
    trained(LocalWorld(), small_config(epochs=1), data=with_a_test_set)
    assert len(set(map(id, closed))) == 3
    closed.clear()
    with pytest.raises(UsageError):
        trained(LocalWorld(), small_config(global_batch_size=1000, output_dir=Path("other")), data=with_a_test_set)
    assert len(set(map(id, closed))) == 3
