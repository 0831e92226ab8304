"""Checkpoint files: a file is whole, or it is named and skipped."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_train import checkpoint
from hvd_train.checkpoint import MAGIC, BadCheckpoint, DiskStore, committed, newest_good, path_of, read
from hvd_train.errors import UsageError
from hvd_train.progress.order import BatchLayout
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.state import Progress, TrainState
from tests.support.launching import wait_for
from tests.support.malicious import Malicious
from tests.support.worlds import own_generator

RUN = Path("run")


def state_at(step: int) -> TrainState:
    """Return a small state whose biases are the number of its steps."""
    model = own_generator(torch.nn.Linear(3, 2))
    with torch.no_grad():
        model.bias.fill_(float(step))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainState(
        model, optimizer, torch.amp.GradScaler("cpu", enabled=False), BatchLayout(4, 2), Progress(1, 8, step)
    )


def store(told: list[str] | None = None, keep: int = 3) -> DiskStore:
    RUN.mkdir(exist_ok=True)
    return DiskStore(RunFolder(RUN), keep, {"recipe": "test"}, (told if told is not None else []).append)


def commit(*steps: int, keep: int = 3) -> list[str]:
    """Commit these steps in one life of a run, and return what the user was told."""
    told: list[str] = []
    disk = store(told, keep)
    for step in steps:
        commit_next(disk, step)
    disk.close()
    return told


def commit_next(disk: DiskStore, step: int) -> None:
    wait_for("the commit before", lambda: disk.commit(state_at(step)))


def steps_on_disk() -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in committed(RUN)]


def test_a_checkpoint_is_read_back_bit_for_bit() -> None:
    """Weights, optimizer, progress and config; `head -2` shows the format and the progress."""
    assert commit(5) == []
    snapshot = read(path_of(RUN, 5))
    assert snapshot["progress"]["step"] == 5
    assert snapshot["config"] == {"recipe": "test"}
    state = state_at(0)
    state.load(snapshot)
    assert state.digest() == state_at(5).digest()
    lines = path_of(RUN, 5).read_bytes().split(b"\n")
    assert lines[0] == b"hvd_train checkpoint"
    assert json.loads(lines[1])["step"] == 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "step-0000000005.ckpt"
    checkpoint.write(path, {**state_at(5).snapshot(), "config": {}})
    return path.read_bytes()


@given(data=st.data())
def test_a_damaged_file_is_found(whole: bytes, data: st.DataObject) -> None:
    """A missing end and any flipped bit, unless it is in the words for `head` and changes nothing that is loaded."""
    path, header_end = Path("damaged.ckpt"), whole.index(b"\n", len(MAGIC))
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
        assert torch.equal(snapshot["model"]["weight"], state_at(5).model.state_dict()["weight"])
        assert snapshot["progress"]["step"] == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 a zip file of torch.save\n", "is not a checkpoint of hvd_train"),
        (MAGIC + b"not json\n", "its header is damaged"),
        (MAGIC + b"[1, 2]\n", "its header is damaged"),
        (MAGIC + b"{}\n", "its header is damaged"),
        (MAGIC + b'{"size": 100, "digest": ""}\nabc', "is truncated: 3 of 100 bytes"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(content: bytes, message: str) -> None:
    """A foreign file, a broken header and a missing end each have their own words."""
    path = Path("x.ckpt")
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"^x\.ckpt.*{message}$"):
        checkpoint.read_named(path)


def test_a_hole_a_pipe_and_a_missing_file_are_refused() -> None:
    for beginning in (b"", MAGIC, MAGIC + b'{"size": 1000000000000, "digest": ""}\n'):
        Path("hole.ckpt").write_bytes(beginning)
        os.truncate("hole.ckpt", 2**40)
        with pytest.raises(UsageError, match=r"hole\.ckpt.* (is not a checkpoint|is damaged|is truncated)"):
            checkpoint.read_named(Path("hole.ckpt"))
    os.mkfifo("x.ckpt")
    with pytest.raises(UsageError, match=r"x\.ckpt: it is no file, but a pipe or a device"):
        checkpoint.read_named(Path("x.ckpt"))
    with pytest.raises(UsageError, match=r"none\.ckpt: No such file"):
        checkpoint.read_named(Path("none.ckpt"))


def test_a_checkpoint_that_lacks_a_value_is_skipped() -> None:
    """Its checksum is right, so another version wrote it: the one before it is used."""
    commit(5)
    snapshot = read(path_of(RUN, 5))
    del snapshot["buffers"]
    checkpoint.write(path_of(RUN, 6), snapshot)
    with pytest.raises(UsageError, match=r"0006\.ckpt is no checkpoint of this version: it has no buffers$"):
        checkpoint.read_named(path_of(RUN, 6))
    newest = newest_good(RUN, lambda message: None)
    assert newest["progress"]["step"] == 5


def test_a_checkpoint_with_code_in_it_is_not_run() -> None:
    """Though its checksum is valid: it is refused in one line, and the one before it is used."""
    commit(5)
    buffer = io.BytesIO()
    torch.save({"model": Malicious()}, buffer)
    payload = buffer.getvalue()
    header = {"digest": hashlib.blake2b(payload, digest_size=32).hexdigest(), "size": len(payload)}
    path_of(RUN, 6).write_bytes(MAGIC + json.dumps(header).encode() + b"\n" + payload)
    with pytest.raises(BadCheckpoint, match="not loaded"):
        read(path_of(RUN, 6))
    told: list[str] = []
    snapshot = newest_good(RUN, told.append)
    assert (snapshot["progress"]["step"], len(told)) == (5, 1)
    torch.save({"weight": Malicious()}, RUN / checkpoint.BEST)
    assert checkpoint.read_weights(RUN / checkpoint.BEST) is None, "the test at the end goes without it"
    assert not Path("owned").exists()


def test_the_newest_whole_checkpoint_is_used() -> None:
    """Damaged ones in front of it are named and kept; without a whole one a run starts at the beginning."""
    commit(1, 2, 3)
    path_of(RUN, 3).write_bytes(path_of(RUN, 3).read_bytes()[:-10])
    path_of(RUN, 2).write_bytes(b"")
    told: list[str] = []
    snapshot = newest_good(RUN, told.append)
    assert snapshot["progress"]["step"] == 1
    assert [path_of(RUN, step).name in line for step, line in zip((3, 2), told, strict=True)] == [True, True]
    assert steps_on_disk() == [3, 2, 1]
    path_of(RUN, 1).write_bytes(b"")
    assert newest_good(RUN, lambda message: None) is None
