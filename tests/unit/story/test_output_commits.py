"""What rank 0 says to be on disk is on disk, and from which files a training goes on."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from hvd_train import checkpoint
from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.output import Output
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import Cut
from hvd_train.run_files import run_folder
from hvd_train.run_files.ledger import Entry, read
from hvd_train.state import Evaluation, Progress, TrainState
from hvd_train.world.world import Place
from tests.support.runs import small_config
from tests.unit.story.test_output import first_cut, full_disk, opened

RUN = Path("run")


def steps_on_disk() -> list[int]:
    """Of the checkpoints of the run, newest first."""
    return [int(path.stem.removeprefix("step-")) for path in checkpoint.committed(RUN)]


def test_a_last_commit_that_the_disk_does_not_take_is_not_called_committed(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes when the file is there, or is known not to be."""
    output = opened(small_config(), state)
    write = checkpoint.write

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", fails)
    assert not output.commit_last(state)
    monkeypatch.setattr(checkpoint, "write", write)
    assert output.commit_last(state)
    assert steps_on_disk() == [7]
    output.close()


def test_a_summary_that_is_not_on_disk_is_not_called_written(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code of a run rests on it; a rank that writes nothing has nothing to lose."""
    output = opened(small_config(), state)
    with full_disk(monkeypatch):
        assert not output.write_summary({"top1": 1.0})
    assert output.write_summary({"top1": 1.0})
    run_folder.take_over(RUN)
    assert not output.write_summary({"top1": 0.0})
    output.close()
    assert json.loads((RUN / "summary.json").read_text()) == {"top1": 1.0}
    assert Output(small_config()).write_summary({"top1": 0.0})


def test_rank_0_whose_weights_are_not_trusted_goes_back_to_its_last_commit(state: TrainState) -> None:
    """Though it has had the folder all the while: what it has not committed is not taken for good."""
    output = opened(small_config(), state)
    assert output.commit_last(state)
    for _ in range(2):
        state.count_step(Totals((1.0, 2.0, 1.0), 20), skipped=False)
    claim = output.claim(state, RUN, first_cut, from_disk=False)
    assert (claim.loaded, state.progress.step) == (False, 9)
    claim = output.claim(state, RUN, first_cut, from_disk=True)
    assert (claim.loaded, state.progress.step) == (True, 7)
    output.open(claim, state, Place())
    assert output.path == RUN
    output.close()


def test_a_rank_that_is_no_longer_the_first_gives_the_folder_up(state: TrainState) -> None:
    """The rank 0 of the next world can have it at once, and finds what this one has taken to write."""
    former = opened(small_config(ledger=True), state)
    former.journal.took(Entry(0, (1, 7), 2, (0, 140), 1))
    assert former.store.commit(state)
    former.open(None, state, Place(1, 2))
    assert former.path is None
    assert steps_on_disk() == [7]
    assert [entry.steps for entry in read(RUN / "ledger.jsonl")] == [(1, 7)]
    latter = opened(small_config(ledger=True), state)
    former.journal.took(Entry(0, (1, 8), 2, (0, 160), 1))
    state.count_step(Totals((1.0, 2.0, 1.0), 20), skipped=False)
    former.store.save_weights(checkpoint.BEST, state)
    assert former.store.commit_last(state).result()
    assert not former.commit_last(state)
    former.close()
    latter.close()
    assert steps_on_disk() == [7]
    assert not (RUN / checkpoint.BEST).exists()
    assert [entry.steps for entry in read(RUN / "ledger.jsonl")] == [(1, 7)]


def test_commits_under_way_are_not_written_into_a_folder_that_was_taken_over(state: TrainState) -> None:
    """A rank 0 that was stopped, and wakes up when the job has gone on without it, trains on for a moment."""
    output = opened(small_config(), state)
    run_folder.take_over(RUN)
    assert not output.store.commit_last(state).result()
    output.store.save_weights(checkpoint.BEST, state)
    output.close()
    assert steps_on_disk() == []
    assert not (RUN / checkpoint.BEST).exists()


def test_as_many_checkpoints_are_kept_as_the_user_wants(state: TrainState) -> None:
    """The newest ones."""
    output = opened(small_config(keep_checkpoints=2), state)
    for _ in range(4):
        state.count_step(Totals((1.0, 2.0, 1.0), 20), skipped=False)
        assert output.store.commit_last(state).result()
    output.close()
    assert steps_on_disk() == [11, 10]


def test_the_survivors_folder_is_that_of_the_job_and_not_that_of_the_flags(state: TrainState) -> None:
    """Without --output-dir a new rank 0 goes on in the folder that rank 0 had named, whose lock may still be held."""
    config = small_config(output_dir=None, recipe="few", resume="never", ledger=True)
    former = opened(config, state)
    folder = former.path
    assert folder is not None
    latter = Output(config)
    claim = latter.claim(state, folder, first_cut, from_disk=False)
    assert (claim.folder.path, claim.folder.earlier, claim.folder.held()) == (folder, True, True)
    assert not former.commit_last(state)
    latter.open(claim, state, Place())
    assert latter.commit_last(state)
    former.close()
    latter.close()
    assert [path.name for path in Path("runs").iterdir()] == [folder.name]


@pytest.mark.parametrize("elastic", [False, True])
def test_a_folder_in_which_another_training_lives_is_not_taken(
    elastic: bool, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by a second command nor by another elastic job, however long that waits."""
    monkeypatch.setattr("hvd_train.output._PATIENCE_SECONDS", 0.0)
    living = opened(small_config(), state)
    for name, value in ((launcher.OWNER, "job"), ("HOROVOD_ELASTIC", "1")) if elastic else ():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="another process is training in run"):
        Output(small_config()).claim(state, None, first_cut, from_disk=True)
    assert living.commit_last(state)
    living.close()


def test_what_a_newly_opened_run_has_written_goes_on_from_its_step(state: TrainState) -> None:
    """Records beyond the step that it goes on from are taken out, those before it stay."""
    first = opened(small_config(), state)
    for step in (6, 8):
        first.journal.event("note", f"at {step}", step=step)
    first.close()
    opened(small_config(), state).close()
    told = [json.loads(line)["message"] for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    assert "at 6" in told
    assert "at 8" not in told


@pytest.mark.parametrize(("epoch", "cursor", "written"), [(1, 0, True), (1, 20, False), (2, 0, False)])
def test_best_weights_of_the_epoch_that_has_just_ended_are_written_again(
    epoch: int, cursor: int, written: bool, state: TrainState
) -> None:
    """Rank 0 may have died while it wrote them; a step later the weights are others, and must not be called so."""
    state.progress = Progress(epoch, cursor, 10)
    state.best = Evaluation(1, {"loss": 0.5, "top1": 0.5, "top5": 1.0})
    output = opened(small_config(), state)
    output.close()
    assert (RUN / checkpoint.BEST).exists() == written
    if written:
        weights = torch.load(RUN / checkpoint.BEST, weights_only=True)
        assert torch.equal(weights["0.weight"], state.model.state_dict()["0.weight"])


def test_a_fresh_run_has_a_cut_of_its_own_and_one_that_goes_on_has_not(state: TrainState) -> None:
    """Also in a folder that an earlier command has made but committed nothing in."""
    config = small_config()
    state.cut = Cut(1, 1)
    opened(config, state).close()
    assert state.cut == first_cut()
    state.cut = Cut(1, 1)
    output = opened(config, state)
    assert state.cut == first_cut()
    state.cut = Cut(10, 5)
    assert output.commit_last(state)
    output.close()
    state.cut = Cut(1, 1)
    opened(config, state).close()
    assert state.cut == Cut(10, 5)
