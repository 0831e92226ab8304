"""Checkpoints: whole or named and skipped; nothing good is ever lost."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_train import checkpoint, config_file, evaluate, recipes
from hvd_train.checkpoint import BadCheckpoint, DiskStore, committed, newest_good, path_of, read
from hvd_train.errors import UsageError
from hvd_train.network.weights import start_from
from hvd_train.progress.order import Cut
from hvd_train.state import Progress, TrainState
from tests.support import runs
from tests.support.launching import wait_for
from tests.support.worlds import own_generator

ROOT = Path(__file__).parents[3]


def state_at(step: int) -> TrainState:
    """A small state after so many steps, with weights that say so."""
    model = own_generator(torch.nn.Linear(3, 2))
    with torch.no_grad():
        model.bias.fill_(float(step))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), Cut(4, 2), Progress(1, 8, step))


def store(folder: Path, told: list[str] | None = None, keep: int = 3) -> DiskStore:
    """A store of a run folder."""
    folder.mkdir(exist_ok=True)
    return DiskStore(folder, keep, {"recipe": "test"}, (told if told is not None else []).append)


def commit(folder: Path, *steps: int, keep: int = 3) -> list[str]:
    """Commit these steps in one life of a run; what the user was told."""
    told: list[str] = []
    disk = store(folder, told, keep)
    for step in steps:
        commit_next(disk, state_at(step))
    disk.close()
    return told


def commit_next(disk: DiskStore, state: TrainState) -> None:
    """Commit as soon as the disk has finished the commit before."""
    wait_for("the commit before", lambda: disk.commit(state))


def steps_on_disk(folder: Path) -> list[int]:
    """Newest first."""
    return [int(path.stem.removeprefix("step-")) for path in committed(folder)]


def test_what_is_committed_is_read_back() -> None:
    """Weights, optimizer, progress and the config come back, bit for bit."""
    run = Path("run")
    assert commit(run, 5) == []
    snapshot = read(path_of(run, 5))
    expected = state_at(5).snapshot()
    assert torch.equal(snapshot["model"]["weight"], expected["model"]["weight"])
    assert snapshot["progress"] == {"epoch": 1, "cursor": 8, "step": 5, "skipped": 0, "skipped_in_row": 0}
    assert snapshot["config"] == {"recipe": "test"}
    state = state_at(0)
    state.load(snapshot)
    assert state.digest() == state_at(5).digest()


def test_the_first_two_lines_say_what_a_file_is() -> None:
    """`head -2` shows the format and the progress."""
    commit(Path("run"), 5)
    lines = path_of(Path("run"), 5).read_bytes().split(b"\n")
    assert lines[0] == b"hvd_train checkpoint 1"
    assert json.loads(lines[1])["step"] == 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a good checkpoint."""
    path = tmp_path_factory.mktemp("whole") / "step-0000000005.ckpt"
    checkpoint.write(path, state_at(5).snapshot())
    return path.read_bytes()


@given(data=st.data())
def test_no_flipped_bit_is_taken_for_good(whole: bytes, data: st.DataObject) -> None:
    """A flip anywhere is noticed (or, in the words that head(1) shows, changes nothing that is loaded)."""
    header_end = whole.index(b"\n", len(checkpoint.MAGIC))
    position = data.draw(st.one_of(st.integers(0, header_end), st.integers(0, len(whole) - 1)))
    damaged = bytearray(whole)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    path = Path("damaged.ckpt")
    path.write_bytes(damaged)
    try:
        snapshot = read(path)
    except BadCheckpoint as error:
        assert "damaged.ckpt" in str(error)
    else:
        assert len(checkpoint.MAGIC) <= position <= header_end
        assert torch.equal(snapshot["model"]["weight"], state_at(5).model.state_dict()["weight"])
        assert snapshot["progress"]["step"] == 5


@given(length=st.integers(0, 3000))
def test_no_truncated_file_is_taken_for_good(whole: bytes, length: int) -> None:
    """Cut short anywhere, even to nothing."""
    path = Path("short.ckpt")
    path.write_bytes(whole[: min(length, len(whole) - 1)])
    with pytest.raises(BadCheckpoint, match=r"short\.ckpt"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 a zip file of torch.save\n", "is not a checkpoint of hvd_train"),
        (b"hvd_train checkpoint 2\n{}\n", "was written by another version of hvd_train"),
        (b"hvd_train checkpoint 1\nnot json\n", "its header is damaged"),
        (b"hvd_train checkpoint 1\n[1, 2]\n", "its header is damaged"),
        (b"hvd_train checkpoint 1\n{}\n", "its header is damaged"),
    ],
)
def test_what_is_no_checkpoint_is_named(content: bytes, message: str) -> None:
    """A foreign file, a newer format and a broken header each have their own words, in one line."""
    path = Path("x.ckpt")
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=message):
        read(path)
    with pytest.raises(UsageError, match=message):
        checkpoint.read_named(path)


def test_a_missing_file_is_an_error_of_use() -> None:
    """The name and the reason."""
    with pytest.raises(UsageError, match=r"none\.ckpt: No such file"):
        checkpoint.read_named(Path("none.ckpt"))


class Malicious:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("owned",)


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_a_checkpoint_that_would_run_code_is_refused(how: str) -> None:
    """A file with a valid checksum and code in it is not loaded, in one line, and the one before it is used."""
    commit(Path("run"), 5)
    buffer = io.BytesIO()
    if how == "pickle":
        pickle.dump(Malicious(), buffer)
    else:
        torch.save({"model": Malicious()}, buffer)
    payload = buffer.getvalue()
    header = {"digest": hashlib.blake2b(payload, digest_size=32).hexdigest(), "size": len(payload)}
    evil = path_of(Path("run"), 6)
    evil.write_bytes(checkpoint.MAGIC + json.dumps(header).encode() + b"\n" + payload)
    with pytest.raises(BadCheckpoint, match="not loaded"):
        read(evil)
    assert not Path("owned").exists()
    told: list[str] = []
    snapshot = newest_good(Path("run"), told.append)
    assert snapshot is not None
    assert snapshot["progress"]["step"] == 5
    assert len(told) == 1


def test_the_newest_good_one_is_used_and_damaged_ones_are_named_and_kept() -> None:
    """Two damaged files in front: each is reported once and left for the user to look at."""
    run = Path("run")
    commit(run, 1, 2, 3)
    path_of(run, 3).write_bytes(path_of(run, 3).read_bytes()[:-10])
    path_of(run, 2).write_bytes(b"")
    told: list[str] = []
    snapshot = newest_good(run, told.append)
    assert snapshot is not None
    assert snapshot["progress"]["step"] == 1
    assert [path_of(run, step).name in line for step, line in zip((3, 2), told, strict=True)] == [True, True]
    assert steps_on_disk(run) == [3, 2, 1]


def test_a_folder_without_a_good_one_gives_none() -> None:
    """A new run starts at the beginning."""
    commit(Path("run"), 1)
    path_of(Path("run"), 1).write_bytes(b"")
    assert newest_good(Path("run"), lambda message: None) is None


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
def no_room() -> Iterator[None]:
    """No file of this process grows beyond 500 bytes: a real error in the middle of a write, as of a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
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


def in_child(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code that can import this file's helpers, in the test's folder."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.unit.story.test_checkpoint import *\n"
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


def weights_with_a_trap(folder: Path) -> Path:
    """A file of weights that would make a file when it is unpickled without care."""
    torch.save({"weight": Malicious()}, folder / "weights.pt")
    return folder / "weights.pt"


@pytest.mark.parametrize("content", ["trap", "empty", "half"])
def test_weights_that_run_code_are_refused_wherever_they_are_named(content: str, tmp_path: Path) -> None:
    """`evaluate` and --weights say in one line that the file cannot be read; nothing of it is run."""
    path = weights_with_a_trap(tmp_path)
    if content != "trap":
        path.write_bytes(path.read_bytes()[: 0 if content == "empty" else 200])
    (tmp_path / "config.yaml").write_text(config_file.dump(recipes.get("digits")))
    path.rename(tmp_path / "model-best.pt")
    with pytest.raises(UsageError, match=r"^cannot read the weights .*model-best\.pt: [^\n]*$"):
        evaluate(tmp_path)
    with pytest.raises(UsageError, match=r"^--weights .*model-best\.pt: cannot be read [^\n]*$"):
        start_from(str(tmp_path / "model-best.pt"), torch.nn.Linear(3, 2), "mine", 2)
    assert not Path("owned").exists()


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
