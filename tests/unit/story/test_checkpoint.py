"""Checkpoint files and the store that commits them."""

import io
import os
import re
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_train import checkpoint
from hvd_train.checkpoint import MAGIC, BadCheckpoint, Store, committed, newest_good, path_of, read
from hvd_train.config import Config
from hvd_train.network import optim
from hvd_train.network.device import LossScaler
from hvd_train.progress.order import BatchLayout
from hvd_train.run_files import run_folder
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.state import Progress, Snapshot, TrainState
from tests.support.faults import Malicious, full_disk, no_room
from tests.support.runs import RUN, small_config, steps_on_disk
from tests.support.worlds import own_generator

CONFIG = Config(recipe="test")


def state_at(step: int) -> TrainState:
    """Return a small state after this number of steps, which is the value of its biases."""
    model = own_generator(torch.nn.Linear(3, 2))
    with torch.no_grad():
        model.bias.fill_(float(step))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainState(
        model,
        {"": optimizer},
        LossScaler("cpu", enabled=False),
        BatchLayout(4, 2),
        Progress(1, 8, step),
    )


def store(keep: int | str = 3, report: Callable[[str], None] = print) -> Store:
    RUN.mkdir(exist_ok=True)
    return Store(RunFolder(RUN), CONFIG.replace(keep_checkpoints=keep), report)


def commit(*steps: int, keep: int | str = 3) -> list[str]:
    """Commit these steps in one start of a run, and return the printed lines."""
    lines = []
    disk = store(keep, lines.append)
    for step in steps:
        disk.commit_last(state_at(step), verified=True).result()
    disk.close()
    return lines


def newest_step(show: Callable[[str], None] = print) -> int:
    return newest_good(RUN, show)["progress"]["step"]


def bias_in(name: str) -> list[float]:
    return torch.load(RUN / name, weights_only=True)["bias"].tolist()


def test_a_checkpoint_is_read_back_bit_for_bit() -> None:
    commit(5)
    snapshot = read(path_of(RUN, 5))
    assert snapshot["config"] == CONFIG.as_dict()
    state = state_at(0)
    state.load(snapshot)
    assert state.digest() == state_at(5).digest()


def written(snapshot: Snapshot) -> bytes:
    file = io.BytesIO()
    checkpoint.write_into(file, snapshot)
    return file.getvalue()


@given(data=st.data())
def test_a_damaged_file_is_found(data: st.DataObject) -> None:
    """A missing end and any flipped bit, unless it changes only the header's text."""
    path = Path("damaged.ckpt")
    whole = written(state_at(5).snapshot())
    header_end = whole.index(b"\n", len(MAGIC))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(BadCheckpoint, match=r"damaged\.ckpt"):
        read(path)
    position = data.draw(st.one_of(st.integers(0, header_end), st.integers(0, len(whole) - 1)))
    damaged = bytearray(whole)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    try:
        snapshot = read(path)
    except BadCheckpoint as error:
        assert "damaged.ckpt" in str(error)
    else:
        assert len(MAGIC) <= position <= header_end
        assert snapshot["progress"]["step"] == 5


def test_a_checkpoint_with_code_in_it_is_not_run() -> None:
    """Though its checksum is valid; the checkpoint before it is used."""
    commit(5)
    path_of(RUN, 6).write_bytes(written({"model": Malicious(), "progress": {}}))
    with pytest.raises(BadCheckpoint, match="not loaded"):
        read(path_of(RUN, 6))
    assert newest_step() == 5
    torch.save({"weight": Malicious()}, RUN / checkpoint.BEST)
    assert checkpoint.read_weights(RUN / checkpoint.BEST) is None
    assert not Path("owned").exists()


def test_the_newest_whole_checkpoint_is_used() -> None:
    """Damaged newer ones are named and kept."""
    assert newest_good(RUN, pytest.fail) is None
    commit(1, 2, 3)
    path_of(RUN, 3).write_bytes(path_of(RUN, 3).read_bytes()[:-10])
    path_of(RUN, 2).write_bytes(b"")
    lines = []
    assert newest_step(lines.append) == 1
    assert [re.findall(r"step-0*(\d)", line) for line in lines] == [["3"], ["2"]]
    assert steps_on_disk() == [3, 2, 1]


class NotPlain:
    """Is pickled, but torch.load refuses it."""


@pytest.mark.parametrize("value", [NotPlain(), lambda: 1], ids=["a class", "a function"])
def test_a_checkpoint_that_could_not_be_read_is_not_written(value: object) -> None:
    """A line says what it has; the last one that can be read stays."""
    lines = []
    commit(1, keep=1)
    disk = store(1, lines.append)
    state = state_at(2)
    state.data = {"classes": [value]}
    assert not disk.commit_last(state).result()
    disk.close()
    assert steps_on_disk() == [1]
    (line,) = lines
    assert re.match(r"not written, .* run/.*0002\.ckpt \(.*(NotPlain|function)", line)


def test_the_newest_checkpoints_are_kept() -> None:
    """Foreign files stay, a damaged file does not push out a good one, and a line names
    a commit that was cut off.
    """
    (RUN / "checkpoints").mkdir(parents=True)
    for name in ("mine.ckpt", "step-0000000009.ckpt.partial"):
        (RUN / "checkpoints" / name).write_text("not yours")
    (line,) = commit(1, 2, 3, 4, 5, keep=2)
    assert line.startswith("the commit step-0000000009.ckpt was cut off")
    assert steps_on_disk() == [5, 4]
    names = [path.name for path in (RUN / "checkpoints").iterdir()]
    assert (len(names), "mine.ckpt" in names) == (3, True)
    path_of(RUN, 5).write_bytes(b"torn")
    commit(4, keep=1)
    assert newest_step() == 4


def test_the_first_checkpoint_of_each_interval_stays() -> None:
    commit(3, 7, 10, 15, keep="1,every=10")
    commit(18, 34, 39, 41, 45, keep="1,every=10")
    assert steps_on_disk() == [45, 41, 34, 10]


def test_the_newest_verified_checkpoint_stays() -> None:
    """Also if later ones, which the ranks could not compare, are kept."""
    commit(1, 2, keep=2)
    disk = store(keep=2)
    for step in (3, 4, 5):
        assert disk.commit_last(state_at(step)).result()
    disk.close()
    assert steps_on_disk() == [5, 4, 2]
    commit(6, keep=2)
    assert steps_on_disk() == [6, 5]


def test_commits_since_the_last_comparison_are_put_aside() -> None:
    """An earlier one stays meanwhile; also with room for two on the disk."""
    disk = store(keep=1)
    trusted = state_at(2)
    for state in (trusted, state_at(3), state_at(4)):
        state.trust(2)
        assert disk.commit_last(state, verified=True).result()
    assert steps_on_disk() == [4, 2]
    disk.save_weights(checkpoint.BEST, trusted)
    disk.distrust(2)
    disk.close()
    assert steps_on_disk() == [2]
    assert not (RUN / checkpoint.BEST).exists()


def test_commits_are_written_one_at_a_time_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy disk postpones a commit, but not the last one; closing the store loses none."""
    may_write = threading.Event()
    write = checkpoint.write_into
    monkeypatch.setattr(
        checkpoint, "write_into", lambda *given: may_write.wait(60) and write(*given)
    )
    disk = store()
    assert disk.commit(state_at(1), verified=True)
    assert not disk.commit(state_at(2), verified=True)
    last = disk.commit_last(state_at(3))
    assert not last.done()
    assert not disk.commit(state_at(4), verified=True)
    may_write.set()
    assert last.result()
    assert steps_on_disk() == [3, 1]
    assert disk.commit(state_at(5), verified=True)
    disk.close()
    assert steps_on_disk() == [5, 3, 1]


def test_weights_for_use_are_a_plain_state_dict() -> None:
    disk = store()
    state = state_at(5)
    disk.save_weights("model-best.pt", state_at(1))
    torch.nn.Linear(3, 2).load_state_dict(torch.load(RUN / "model-best.pt", weights_only=True))
    state.average = optim.MovingAverage(state.model, 0.5)
    with torch.no_grad():
        state.model.get_parameter("bias").fill_(6.0)
    disk.save_weights("model-best.pt", state)
    assert disk.commit_last(state, final_weights=True).result()
    disk.close()
    assert bias_in("model-best.pt") == bias_in("model-final.pt") == [5.0, 5.0]
    assert read(path_of(RUN, 5))["model"]["bias"].tolist() == [6.0, 6.0]


def test_a_full_disk_costs_no_checkpoint_that_is_there() -> None:
    """A line for each commit says so."""
    lines = []
    commit(1)
    disk = store(1, lines.append)
    with no_room():
        assert not disk.commit_last(state_at(2), verified=True).result()
        assert not disk.commit_last(state_at(3), final_weights=True).result()
        assert [path for path in RUN.rglob("*") if path.is_file()] == [path_of(RUN, 1)]
    assert disk.commit_last(state_at(4), verified=True).result()
    disk.close()
    assert steps_on_disk() == [4]
    assert lines[0].endswith("; earlier checkpoints stay")
    assert [line.partition("; ")[0] for line in lines] == [
        f"cannot write run/{name}: No space left on device"
        for name in (
            "checkpoints/step-0000000002.ckpt",
            "checkpoints/step-0000000003.ckpt",
            "model-final.pt",
        )
    ]


def test_a_full_disk_costs_all_checkpoints_but_the_newest_whole_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a commit and for weights."""
    write = checkpoint.write_into
    save = torch.save
    room = [3]

    def check():
        if len(committed(RUN)) >= room[0]:
            full_disk()

    monkeypatch.setattr(checkpoint, "write_into", lambda *given: check() or write(*given))
    commit(1, 2, 3, keep="2,every=1")
    path_of(RUN, 3).write_bytes(b"torn")
    room[0] = 2
    told, failed = commit(4, keep="1,every=1")
    assert told == "the disk is full: from now on only the newest checkpoint stays"
    assert "step-0000000004.ckpt: No space left" in failed
    assert (steps_on_disk(), newest_step()) == ([3, 2], 2)
    room[0] = 3
    assert commit(5, 6, 7) == [told]
    assert steps_on_disk() == [7]
    commit(8)
    monkeypatch.setattr(torch, "save", lambda *given: check() or save(*given))
    disk = store()
    room[0] = 2
    disk.save_weights("model-best.pt", state_at(9))
    disk.close()
    assert bias_in("model-best.pt") == [9.0, 9.0]
    assert steps_on_disk() == [8]


def test_a_process_that_was_stopped_does_not_replace_a_newer_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it continues, another process has taken the folder over and written the same step."""
    fsync = os.fsync
    config = small_config()
    disk = Store(run_folder.claim(config, datetime.now()), CONFIG, print)

    def stopped_meanwhile(descriptor):
        monkeypatch.setattr(os, "fsync", fsync)
        run_folder.claim(config, datetime.now(), evict=True)
        path_of(RUN, 1).write_text("the other's")

    monkeypatch.setattr(os, "fsync", stopped_meanwhile)
    assert not disk.commit_last(state_at(1)).result()
    disk.close()
    assert path_of(RUN, 1).read_text() == "the other's"
