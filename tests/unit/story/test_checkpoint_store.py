"""The store of a run's commits: what is on disk after which faults, and what the user is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest
import torch

from hvd_train.checkpoint import DiskStore, newest_good, path_of, read
from hvd_train.network import optim
from hvd_train.run_files import run_folder
from hvd_train.settings.optimizer import OptimizerConfig
from tests.support.full_disk import no_room
from tests.support.launching import wait_for
from tests.support.runs import small_config
from tests.unit.story.test_checkpoint import RUN, commit, commit_next, state_at, steps_on_disk, store

ROOT = Path(__file__).parents[3]


def bias_in(name: str) -> list[float]:
    return torch.load(RUN / name, weights_only=True)["bias"].tolist()


def files() -> list[str]:
    return sorted(path.name for path in RUN.rglob("*") if path.is_file())


def test_the_newest_checkpoints_are_kept() -> None:
    """As many as the user wants; foreign files stay, and a damaged file does not push out a good one."""
    (RUN / "checkpoints").mkdir(parents=True)
    (RUN / "checkpoints" / "mine.ckpt").write_text("not yours")
    commit(1, 2, 3, 4, 5, keep=2)
    assert steps_on_disk() == [5, 4]
    assert (RUN / "checkpoints" / "mine.ckpt").exists()
    path_of(RUN, 5).write_bytes(b"torn")
    commit(4, keep=1)
    snapshot = newest_good(RUN, lambda message: None)
    assert snapshot["progress"]["step"] == 4


def test_commits_are_written_one_at_a_time_in_their_order(may_write: threading.Event) -> None:
    """A busy disk puts a commit off, but not the last one; nothing that was taken is lost when the store closes."""
    disk = store()
    assert disk.commit(state_at(1))
    assert not disk.commit(state_at(2))
    last = disk.commit_last(state_at(3))
    assert not last.done()
    assert not disk.commit(state_at(4)), "the disk is busy with the last one"
    may_write.set()
    assert last.result()
    assert steps_on_disk() == [3, 1]
    assert disk.commit(state_at(5))
    disk.close()
    assert steps_on_disk() == [5, 3, 1]


@pytest.mark.parametrize("last", [False, True])
def test_later_steps_are_not_in_a_commit(last: bool) -> None:
    """Training continues while the file is written; weights and step are of the moment of the commit."""
    disk, state = store(), state_at(5)
    went_on, trains = threading.Event(), threading.current_thread()

    def late(*_: object) -> None:
        assert threading.current_thread() is trains or went_on.wait(60)

    state.model.register_state_dict_pre_hook(late)
    disk.commit_last(state, final_weights=True) if last else disk.commit(state)
    with torch.no_grad():
        state.model.get_parameter("bias").fill_(6.0)
    state.progress = state.progress.after_step(4)
    went_on.set()
    disk.close()
    assert steps_on_disk() == [5]
    assert read(path_of(RUN, 5))["model"]["bias"].tolist() == [5.0, 5.0]
    if last:
        assert bias_in("model-final.pt") == [5.0, 5.0]


def test_weights_for_use_are_a_plain_state_dict() -> None:
    disk, state = store(), state_at(5)
    disk.save_weights("model-best.pt", state_at(1))
    torch.nn.Linear(3, 2).load_state_dict(torch.load(RUN / "model-best.pt", weights_only=True))
    state.average = optim.moving_average(OptimizerConfig(ema_decay=0.5), state.model, ())
    with torch.no_grad():
        state.model.get_parameter("bias").fill_(6.0)
    disk.save_weights("model-best.pt", state)
    assert disk.commit_last(state, final_weights=True).result()
    disk.close()
    assert bias_in("model-best.pt") == bias_in("model-final.pt") == [5.0, 5.0]
    assert read(path_of(RUN, 5))["model"]["bias"].tolist() == [6.0, 6.0]


def test_a_full_disk_costs_no_checkpoint_that_is_there() -> None:
    """One line names the newest, one says that the disk has space again; the last commit always has a line."""
    told: list[str] = []
    commit(1)
    disk = store(told, keep=1)
    with no_room():
        commit_next(disk, 2)
        commit_next(disk, 3)
        assert not disk.commit_last(state_at(3), final_weights=True).result()
        assert files() == ["step-0000000001.ckpt"]
    assert torch.serialization.get_crc32_options(), "files of others have lost torch's own checksums"
    commit_next(disk, 4)
    commit_next(disk, 5)
    disk.close()
    assert steps_on_disk() == [5]
    folder, why = "cannot write run/checkpoints/step-000000000", "No space left on device"
    assert told == [
        f"{folder}2.ckpt: {why}; training continues, the newest good checkpoint is step-0000000001.ckpt",
        f"{folder}3.ckpt: {why}; the newest good checkpoint is step-0000000001.ckpt",
        f"cannot write run/model-final.pt: {why}",
        "disk has space again: wrote the checkpoint of step 4",
    ]


def test_best_weights_that_do_not_fit_are_written_with_a_later_commit() -> None:
    """They are those of their moment, though the model is trained on meanwhile; the user is told once."""
    told: list[str] = []
    disk, state = store(told), state_at(1)
    with no_room():
        disk.save_weights("model-best.pt", state)
        with torch.no_grad():
            state.model.get_parameter("bias").fill_(6.0)
        commit_next(disk, 2)
        wait_for("both errors", lambda: len(told) == 2)
    commit_next(disk, 3)
    disk.close()
    assert steps_on_disk() == [3]
    assert bias_in("model-best.pt") == [1.0, 1.0]
    assert [line for line in told if "model-best.pt" in line] == [
        "cannot write run/model-best.pt: No space left on device; it is kept in memory until it fits"
    ]


def test_a_process_that_is_stopped_while_it_writes_does_not_replace_a_newer_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It wakes up when another process has taken the folder over, and has written the same step."""
    fsync = os.fsync
    disk = DiskStore(run_folder.claim(small_config(output_dir=RUN), datetime.now()), 3, {}, [].append)

    def stopped_meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        run_folder.take_over(RUN)
        path_of(RUN, 1).write_text("the other's")

    monkeypatch.setattr(os, "fsync", stopped_meanwhile)
    assert not disk.commit_last(state_at(1)).result()
    disk.close()
    assert path_of(RUN, 1).read_text() == "the other's"


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_write_leaves_the_checkpoint_before() -> None:
    """After SIGKILL with half of a file written the earlier checkpoint is used, and the half one is removed."""
    commit(1)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.unit.story.test_checkpoint_store import *\n"
        "def torn(descriptor):\n"
        "    os.ftruncate(descriptor, 700)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.fsync = torn\n"
        "commit(2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    partial = RUN / "checkpoints/step-0000000002.ckpt.partial"
    assert partial.stat().st_size == 700
    snapshot = newest_good(RUN, pytest.fail)
    assert snapshot["progress"]["step"] == 1
    assert commit(3) == []
    assert not partial.exists()
