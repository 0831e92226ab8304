"""A store of checkpoints: what it keeps on disk, and what it tells where a file does not fit."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_train import checkpoint
from hvd_train.checkpoint import DiskStore, newest_good, path_of, read
from tests.support import runs
from tests.support.launching import wait_for
from tests.unit.story.test_checkpoint import commit, commit_next, state_at, steps_on_disk, store

ROOT = Path(__file__).parents[3]


def test_the_last_few_are_kept() -> None:
    """Older ones go as newer ones come; foreign files in the folder are left alone."""
    run = Path("run")
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "mine.ckpt").write_text("not yours")
    commit(run, 1, 2, 3, 4, 5, keep=2)
    assert steps_on_disk(run) == [5, 4]
    assert (run / "checkpoints" / "mine.ckpt").exists()


def test_a_damaged_newer_file_does_not_push_out_the_good_ones() -> None:
    """Resumed before a damaged checkpoint with only one to keep, a run keeps the good one it writes."""
    run = Path("run")
    commit(run, 10, 20, keep=2)
    path_of(run, 20).write_bytes(b"torn")
    commit(run, 12, 14, keep=1)
    snapshot = newest_good(run, lambda message: None)
    assert snapshot is not None
    assert snapshot["progress"]["step"] == 14


@contextmanager
def no_room(most_bytes: int = 500) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: a real error in the middle of a write, as of a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_older_one_goes_only_when_the_newer_is_safe() -> None:
    """A full disk is one line that names the newest good file; nothing is deleted and training goes on."""
    run, told = Path("run"), []
    disk = store(run, told, keep=1)
    assert disk.commit_last(state_at(1)).result()
    with no_room():
        commit_next(disk, state_at(2))
        wait_for("the error", lambda: told)
    assert steps_on_disk(run) == [1]
    assert len(told) == 1
    assert "File too large; training goes on, the newest good checkpoint is step-0000000001.ckpt" in told[0]
    commit_next(disk, state_at(3))
    disk.close()
    assert steps_on_disk(run) == [3]


def test_a_full_disk_is_told_once_and_so_is_the_commit_that_fits_again() -> None:
    """Not at every commit: there may be one a second, and the disk may be full for a weekend."""
    run, told = Path("run"), []
    disk = store(run, told)
    with no_room():
        for step in (1, 2, 3):
            commit_next(disk, state_at(step))
        assert not disk.commit_last(state_at(3)).result()
    for step in (4, 5):
        commit_next(disk, state_at(step))
    disk.close()
    assert steps_on_disk(run) == [5, 4]
    assert [line.partition("; ")[2] for line in told[:2]] == [
        "training goes on, there is no checkpoint yet",
        "there is no checkpoint yet",
    ]
    assert told[2:] == ["commits fit again: step 4 is on disk"]


@pytest.mark.parametrize("what", ["commit", "final", "best"])
def test_a_store_says_at_its_end_whether_all_is_on_disk(what: str) -> None:
    """A failed last commit, or weights that could not be written, are not reported as written; nothing is left."""
    disk = store(Path("run"))
    with no_room():
        if what == "best":
            disk.save_weights("model-best.pt", state_at(1))
        assert not disk.commit_last(state_at(1), final_weights=what == "final").result()
    disk.close()
    assert [path for path in Path("run").rglob("*") if path.is_file()] == []


def test_best_weights_that_did_not_fit_are_written_with_a_later_commit() -> None:
    """The weights of that moment, not those of the commit; the user is told once that they did not fit."""
    told: list[str] = []
    disk = store(Path("run"), told)
    with no_room():
        disk.save_weights("model-best.pt", state_at(1))
        commit_next(disk, state_at(2))
        wait_for("both errors", lambda: len(told) == 2)
    commit_next(disk, state_at(3))
    disk.close()
    assert steps_on_disk(Path("run")) == [3]
    assert torch.load("run/model-best.pt", weights_only=True)["bias"].tolist() == [1.0, 1.0]
    assert [line for line in told if "model-best.pt" in line] == [
        "cannot write run/model-best.pt: File too large; it is kept in memory until it fits"
    ]


def test_the_last_commit_comes_before_the_final_weights() -> None:
    """A process that dies while it writes the large weights has committed; both hold the same model."""
    order: list[str] = []
    write, write_weights = checkpoint.write, checkpoint.write_weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write", lambda *_: (order.append("commit"), write(*_)))
        patch.setattr(checkpoint, "write_weights", lambda *_: (order.append("weights"), write_weights(*_)))
        disk = store(Path("run"))
        assert disk.commit_last(state_at(4), final_weights=True).result()
    disk.close()
    assert order == ["commit", "weights"]
    assert torch.load("run/model-final.pt", weights_only=True)["bias"].tolist() == [4.0, 4.0]
    assert steps_on_disk(Path("run")) == [4]


def test_nothing_is_written_into_a_folder_that_another_process_has_taken_over() -> None:
    """Neither commits nor weights; the unfinished and the finished files of the other process stay as they are."""
    held = True
    told: list[str] = []
    run = Path("run")
    run.mkdir()
    disk = DiskStore(run, 1, {}, told.append, lambda: held)
    assert disk.commit_last(state_at(1)).result()
    held = False
    (run / "model-best.pt.partial").write_text("the other's")
    disk.commit(state_at(2))
    disk.save_weights("model-best.pt", state_at(2))
    assert not disk.commit_last(state_at(2), final_weights=True).result()
    disk.close()
    assert steps_on_disk(run) == [1]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "model-best.pt.partial"]
    assert "another process has taken over the folder" in told[0]


def test_a_folder_that_is_taken_over_during_a_write_keeps_the_others_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped within a write and wakes up later does not put its file in place of a newer one."""
    held = True
    run = Path("run")
    run.mkdir()
    disk = DiskStore(run, 3, {}, [].append, lambda: held)
    fsync = os.fsync

    def stopped_meanwhile(descriptor: int) -> None:
        nonlocal held
        fsync(descriptor)
        held = False
        path_of(run, 1).write_text("the other's")

    monkeypatch.setattr(os, "fsync", stopped_meanwhile)
    assert not disk.commit_last(state_at(1)).result()
    disk.close()
    assert path_of(run, 1).read_text() == "the other's"


def test_weights_load_without_this_package() -> None:
    """`model-best.pt` is a plain state_dict; a later one takes its place."""
    disk = store(Path("run"))
    disk.save_weights("model-best.pt", state_at(1))
    disk.save_weights("model-best.pt", state_at(2))
    disk.close()
    weights = torch.load("run/model-best.pt", weights_only=True)
    assert weights["bias"].tolist() == [2.0, 2.0]
    torch.nn.Linear(3, 2).load_state_dict(weights)


def test_a_run_that_goes_on_in_the_other_format_leaves_one_file_of_each_kind() -> None:
    """An old file must not be taken for the newest weights; it goes only when the new one is on disk."""
    run = Path("run")
    for number, kind in enumerate(("pt", "safetensors", "pt"), 1):
        run.mkdir(exist_ok=True)
        disk = DiskStore(run, 3, {}, pytest.fail, weights_format=kind)
        disk.save_weights("model-best.pt", state_at(number))
        assert [path.name for path in run.glob("model-best*")] == [f"model-best.{kind}"]
        assert (checkpoint.read_weights(run / f"model-best.{kind}") or {})["bias"].tolist() == [number, number]
        assert disk.commit_last(state_at(number), final_weights=True).result()
        assert sorted(path.name for path in run.glob("model-*")) == [f"model-best.{kind}", f"model-final.{kind}"]
        disk.close()
    told: list[str] = []
    disk = DiskStore(run, 3, {}, told.append, weights_format="safetensors")
    with no_room(50):
        disk.save_weights("model-best.pt", state_at(4))
    assert [path.name for path in run.glob("model-best*")] == ["model-best.pt"]
    assert told == ["cannot write run/model-best.safetensors: File too large; it is kept in memory until it fits"]
    disk.close()


def in_child(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code that can import this file's helpers, in the test's folder."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.unit.story.test_checkpoint_store import *\n"
    command = [sys.executable, "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_real_limit_on_file_size_costs_nothing_good() -> None:
    """Where the system refuses to write more, the run says so, keeps what is there and leaves no partial file."""
    commit(Path("run"), 1)
    done = in_child(
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
        "print(commit(Path('run'), 2, keep=1))"
    )
    assert done.returncode == 0, done.stderr
    assert "File too large; training goes on, the newest good checkpoint is step-0000000001.ckpt" in done.stdout
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["step-0000000001.ckpt"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 512


def test_a_kill_in_the_middle_of_a_write_leaves_the_one_before() -> None:
    """After SIGKILL with half of a file written the previous checkpoint is used, and the half one is cleared away."""
    commit(Path("run"), 1)
    done = in_child(
        "def torn(descriptor):\n"
        "    os.ftruncate(descriptor, 700)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.fsync = torn\n"
        "commit(Path('run'), 2)"
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    partial = Path("run/checkpoints/step-0000000002.ckpt.partial")
    assert partial.stat().st_size == 700
    told: list[str] = []
    snapshot = newest_good(Path("run"), told.append)
    assert snapshot is not None
    assert (snapshot["progress"]["step"], told) == (1, [])
    assert commit(Path("run"), 3) == []
    assert not partial.exists()


def test_a_busy_disk_puts_a_commit_off_but_not_the_last_one(may_write: threading.Event) -> None:
    """While one file is being written another is not begun; the last one comes after it."""
    disk = store(Path("run"))
    assert disk.commit(state_at(1))
    assert not disk.commit(state_at(2))
    may_write.set()
    assert disk.commit_last(state_at(3)).result()
    disk.close()
    assert steps_on_disk(Path("run")) == [3, 1]
    assert runs.equal(read(path_of(Path("run"), 1))["model"], state_at(1).model.state_dict())


def test_one_commit_is_written_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one waits for the one before: two at once could leave the older one as the newest on disk."""
    second_began, steps, plain = threading.Event(), list[int](), checkpoint.write

    def write(path: Path, snapshot: Any, *others: Any) -> None:
        if steps:
            second_began.set()
        steps.append(snapshot["progress"]["step"])
        if len(steps) == 1:
            assert not second_began.wait(0.2)
        plain(path, snapshot, *others)

    monkeypatch.setattr(checkpoint, "write", write)
    disk = store(Path("run"))
    assert disk.commit(state_at(1))
    assert disk.commit_last(state_at(2)).result()
    disk.close()
    assert (steps, steps_on_disk(Path("run"))) == ([1, 2], [2, 1])


def test_what_a_full_disk_means_is_told_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """While training goes on, and at its end: which file, why, which checkpoint is the newest, what becomes of it."""

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    told: list[str] = []
    disk = store(Path("run"), told)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        patch.setattr(checkpoint, "write_weights", full)
        commit_next(disk, state_at(1))
        commit_next(disk, state_at(2))
        disk.save_weights(checkpoint.BEST, state_at(2))
        assert not disk.commit_last(state_at(3), final_weights=True).result()
    assert disk.commit_last(state_at(4)).result()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        assert not disk.commit_last(state_at(5)).result()
    disk.close()
    folder, why = "cannot write run/checkpoints/step-000000000", "No space left on device"
    best = f"cannot write run/{checkpoint.BEST}: {why}"
    assert told == [
        f"{folder}1.ckpt: {why}; training goes on, there is no checkpoint yet",
        f"{best}; it is kept in memory until it fits",
        f"{folder}3.ckpt: {why}; there is no checkpoint yet",
        best,
        f"cannot write run/{checkpoint.FINAL}: {why}",
        "commits fit again: step 4 is on disk",
        f"{folder}5.ckpt: {why}; the newest good checkpoint is step-0000000004.ckpt",
    ]
    for name in (checkpoint.BEST, checkpoint.FINAL):
        assert checkpoint.read_weights(Path("run") / name) is not None
