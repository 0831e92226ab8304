"""Ranks that a program starts itself, by the real horovodrun: values, errors, and what ends them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hvd_train import checkpoint
from hvd_train.launch import processes
from tests.support.launching import finished, started, wait_for

pytestmark = pytest.mark.integration

ASKS = """
import os
import signal
import hvd_train

def place(*, of):
    print("rank", os.environ["HOROVOD_RANK"], of)
    return os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]

def fails():
    if os.environ["HOROVOD_RANK"] == "1":
        raise ZeroDivisionError("of mine")
    signal.pause()

print("value", hvd_train.start_ranks(place, of="mine", np=2))
hvd_train.start_ranks(fails, np=2)
"""
TRAINS = """
import pickle
import sys
import torch
import hvd_train

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), index / 64), index % 2

def model(num_classes):
    return torch.nn.Linear(4, num_classes)

def data(config):
    return Rows(), Rows()

config = hvd_train.recipes.digits().replace(
    recipe="rows", epochs=int(sys.argv[1]), output_dir="run", workers=1, log_steps=1, device="cpu", log_to=("none",)
)
result = hvd_train.start_ranks(hvd_train.train, config, model=model, data=data, np=2)
again = pickle.loads(pickle.dumps(result))
print("result", again.scores == result.scores, again.epochs, again.world_size)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a program: by it all of its processes are known, and its temporary files have their folder.

    The path of that is a short one: sockets of Python's own lie in it, whose names have 107 bytes at most.
    """
    with TemporaryDirectory() as folder:
        yield {"OF_TEST": str(tmp_path), "TMPDIR": folder}


def assert_nothing_is_left(mine: dict[str, str]) -> None:
    """Wait for the last process of the program, and see that its folder is empty."""
    wait_for("the end of all processes", lambda: not processes.started_with({"OF_TEST": mine["OF_TEST"]}))
    assert list(Path(mine["TMPDIR"]).glob("hvd_train-*")) == []


def test_a_value_comes_back_and_an_error_ends_all_ranks(mine: dict[str, str], tmp_path: Path) -> None:
    """Rank 0 prints as a single process does; the traceback is there once, named by its rank, without our frames."""
    (tmp_path / "mine.py").write_text(ASKS)
    code, output = finished([sys.executable, "mine.py"], tmp_path, variables=mine)
    assert code == 1, output
    assert "\nrank 0 mine\n" in f"\n{output}"
    assert "[1]<stdout>:rank 1 mine\n" in output
    assert "value ('0', '2')\n" in output
    raised = output[output.rindex("HvdTrainError: ") :]
    assert raised.startswith("HvdTrainError: rank 1: Traceback")
    assert output.count("\nZeroDivisionError: of mine\n") == 1
    assert "called.py" not in output
    assert_nothing_is_left(mine)


@pytest.mark.slow
def test_a_training_whose_data_set_is_the_program_s_own(mine: dict[str, str], tmp_path: Path) -> None:
    """Loader processes are sent its class; the result comes back, and can be pickled."""
    (tmp_path / "mine.py").write_text(TRAINS)
    code, output = finished([sys.executable, "mine.py", "2"], tmp_path, variables=mine)
    assert code == 0, output
    assert "result True 2 2\n" in output
    assert_nothing_is_left(mine)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_ends_the_program_ends_its_ranks_after_a_commit(
    number: signal.Signals, mine: dict[str, str], tmp_path: Path
) -> None:
    """Ctrl-C, and the death of a notebook's kernel; nothing is left."""
    (tmp_path / "mine.py").write_text(TRAINS)
    output, metrics = tmp_path / "output.txt", tmp_path / "run" / "metrics.jsonl"
    with started([sys.executable, "mine.py", "100000"], tmp_path, output, mine) as program:
        wait_for("steps", lambda: metrics.exists() and '"kind": "step"' in metrics.read_text(), limit_s=150)
        program.send_signal(number)
        program.wait(60)
        assert_nothing_is_left(mine)
    assert checkpoint.committed(tmp_path / "run")
    if number == signal.SIGINT:
        assert "committed; the same command goes on from there" in output.read_text()
        assert output.read_text().endswith("\nKeyboardInterrupt\n")
