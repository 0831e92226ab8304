"""Checkpoints: whole or named and skipped; nothing good is ever lost."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_train import checkpoint, config_file, evaluate, recipes
from hvd_train.checkpoint import MAGIC, BadCheckpoint, DiskStore, committed, newest_good, path_of, read
from hvd_train.errors import UsageError
from hvd_train.network.weights import start_from
from hvd_train.progress.order import Cut
from hvd_train.state import Progress, TrainState
from tests.support.launching import wait_for
from tests.support.malicious import Malicious
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("beginning", [b"", MAGIC, MAGIC + b'{"size": 1000000000000, "digest": ""}\n'])
def test_a_hole_is_no_checkpoint(beginning: bytes) -> None:
    """A file of a terabyte is not read to the end to see that its beginning is none of a checkpoint."""
    path = Path("x.ckpt")
    path.write_bytes(beginning)
    os.truncate(path, 2**40)
    with pytest.raises(BadCheckpoint, match=r"x\.ckpt.* (is not a checkpoint|is damaged|is truncated)"):
        read(path)


@pytest.mark.timeout(60)
def test_a_pipe_is_no_checkpoint() -> None:
    """It is not waited for; the reason is in the line."""
    os.mkfifo("x.ckpt")
    with pytest.raises(BadCheckpoint, match=r"x\.ckpt: it is no file, but a pipe or a device"):
        read(Path("x.ckpt"))


def test_a_missing_file_is_an_error_of_use() -> None:
    """The name and the reason."""
    with pytest.raises(UsageError, match=r"none\.ckpt: No such file"):
        checkpoint.read_named(Path("none.ckpt"))


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
