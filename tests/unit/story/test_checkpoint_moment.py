"""A commit is of the moment in which it was asked for, however much later the disk takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch

from hvd_train import checkpoint
from hvd_train.checkpoint import BadCheckpoint, DiskStore, path_of, read
from hvd_train.errors import UsageError
from hvd_train.network import optim
from hvd_train.run_files.durable import Permission
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.state import Snapshot, TrainState
from tests.support.full_disk import no_room
from tests.unit.story.test_checkpoint import state_at, steps_on_disk, store, weights_with_a_trap

RUN = Path("run")


def in_the_background(state: TrainState) -> threading.Event:
    """Have whoever copies this state in another thread wait for the event, as a slow disk's thread may do by itself."""
    went_on, trains = threading.Event(), threading.current_thread()

    def late(*_: object) -> None:
        assert threading.current_thread() is trains or went_on.wait(30)

    state.model.register_state_dict_pre_hook(late)
    return went_on


KINDS: dict[str, Callable[[DiskStore, TrainState], bool | Future[bool]]] = {
    "a commit": lambda disk, state: disk.commit(state),
    "the last one": lambda disk, state: disk.commit_last(state, final_weights=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_after_a_commit_are_not_in_it(kind: str) -> None:
    """Training goes on while the file is written: weights and step of one moment, never a mixture."""
    disk, state = store(RUN), state_at(5)
    went_on = in_the_background(state)
    KINDS[kind](disk, state)
    with torch.no_grad():
        state.model.get_parameter("bias").fill_(6.0)
    state.progress = state.progress.after_step(4)
    went_on.set()
    disk.close()
    assert steps_on_disk(RUN) == [5]
    assert read(path_of(RUN, 5))["model"]["bias"].tolist() == [5.0, 5.0]
    if kind == "the last one":
        assert torch.load(RUN / "model-final.pt", weights_only=True)["bias"].tolist() == [5.0, 5.0]


def test_best_weights_that_wait_for_the_disk_are_those_of_their_moment() -> None:
    """Though the model is trained on meanwhile."""
    disk, state = store(RUN), state_at(5)
    with no_room():
        disk.save_weights("model-best.pt", state)
    with torch.no_grad():
        state.model.get_parameter("bias").fill_(6.0)
    assert disk.commit_last(state).result()
    disk.close()
    assert torch.load(RUN / "model-best.pt", weights_only=True)["bias"].tolist() == [5.0, 5.0]


def test_the_last_commit_comes_after_the_one_that_is_being_written(may_write: threading.Event) -> None:
    """The disk is busy when the training is stopped: nobody is told that all is on disk before it is."""
    disk = store(RUN)
    assert disk.commit(state_at(1))
    last = disk.commit_last(state_at(2))
    assert not last.done()
    assert not disk.commit(state_at(3)), "the disk is busy with the last one"
    may_write.set()
    assert last.result()
    assert steps_on_disk(RUN) == [2, 1]
    disk.close()


def test_nothing_pushes_in_behind_the_last_commit(may_write: threading.Event) -> None:
    """While it is being written another commit is put off, as behind any other."""
    disk = store(RUN)
    last = disk.commit_last(state_at(1))
    assert not disk.commit(state_at(2))
    may_write.set()
    assert last.result()
    assert disk.commit_last(state_at(2)).result()
    disk.close()


def test_files_of_others_keep_the_checksums_of_torch() -> None:
    """Ours need none of torch's own; what the user's code saves in the same process has them, also where we fail."""
    assert torch.serialization.get_crc32_options()
    RUN.mkdir()
    for room in (no_room(), nullcontext()):
        with room, suppress(OSError):
            checkpoint.write(path_of(RUN, 1), state_at(1).snapshot())
        assert torch.serialization.get_crc32_options()
    assert steps_on_disk(RUN) == [1]


def test_weights_for_use_are_those_of_the_moving_average() -> None:
    """Where one is kept, the best and the final file have it, and not the weights that it is made of."""
    state = state_at(5)
    state.average = optim.moving_average(OptimizerConfig(ema_decay=0.5), state.model, ())
    with torch.no_grad():
        state.model.get_parameter("bias").fill_(6.0)
    disk = store(RUN)
    disk.save_weights("model-best.pt", state)
    assert disk.commit_last(state, final_weights=True).result()
    disk.close()
    for name in ("model-best.pt", "model-final.pt"):
        assert torch.load(RUN / name, weights_only=True)["bias"].tolist() == [5.0, 5.0]
    assert read(path_of(RUN, 5))["model"]["bias"].tolist() == [6.0, 6.0]


def test_a_store_that_is_closed_has_written_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit in the background is not lost because the training ends right after it."""
    writing, write = threading.Event(), checkpoint.write

    def slow(path: Path, snapshot: Snapshot, permission: Permission) -> None:
        writing.set()
        write(path, snapshot, permission)

    monkeypatch.setattr(checkpoint, "write", slow)
    disk = store(RUN)
    assert disk.commit(state_at(1))
    disk.close()
    assert writing.is_set()
    assert steps_on_disk(RUN) == [1]


def test_unfinished_files_of_a_killed_process_are_cleared_away() -> None:
    """Those of commits and those of weights, which may be as large as the model, and nothing else."""
    store(RUN).close()
    for name in ("model-best.pt.partial", "model-best.pt", "checkpoints/step-0000000001.ckpt.partial"):
        (RUN / name).write_text("x")
    store(RUN).close()
    assert [path.name for path in RUN.rglob("*") if path.is_file()] == ["model-best.pt"]


def test_a_file_that_was_cut_short_is_called_so() -> None:
    """A full disk or a broken copy is another matter than a rotten bit: the message says how much is missing."""
    disk = store(RUN)
    assert disk.commit_last(state_at(5)).result()
    disk.close()
    path = path_of(RUN, 5)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match=r"is truncated: (\d+) of (\d+) bytes") as told:
        read(path)
    have, whole = (int(word) for word in str(told.value).split() if word.isdigit())
    assert whole - have == 100
    with pytest.raises(UsageError, match="truncated"):
        checkpoint.read_named(path)


def test_best_weights_with_code_in_them_are_not_read(tmp_path: Path) -> None:
    """The test at the end of a training reads the file again: what somebody put in its place is not run."""
    assert checkpoint.read_weights(weights_with_a_trap(tmp_path)) is None
    assert not Path("owned").exists()
    assert checkpoint.read_weights(tmp_path / "none.pt") is None
