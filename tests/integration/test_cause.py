"""A job that fails ends with its first cause, whatever starts it."""

import sys
from pathlib import Path

import pytest

from tests.support.launching import finished

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Rank 1 fails in step 5, in the way that the argument names.
PROGRAM = """
import ctypes, os, pathlib, signal, sys
import torch
import torch.nn.functional as F
import hvd_train

how = sys.argv.pop(1)

def fail():
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        ctypes.string_at(0)  # crash
    if how == "exit":
        os._exit(17)
    raise KeyError("fails")  # raise

def main():
    _, config = hvd_train.parse_args(epochs=3, batch_size=32, output_dir=pathlib.Path("run"))
    data = torch.utils.data.TensorDataset(torch.zeros(640, 8), torch.zeros(640).long())
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hvd_train.Session(model, optimizer, data, config=config) as session:
        for step in session.steps():
            for micro in step:
                if step.number == 5 and session.rank == 1:
                    fail()
                x, y = micro.batch
                micro.backward(F.cross_entropy(model(x), y, reduction="none"))

main()
"""
WORDS = {
    "kill": ["SIGKILL", "137", "-9", "signal 9"],
    "crash": ["mine.py"],
    "exit": ["exit code 17", "exited with code 17"],
    "raise": ["KeyError: 'fails'"],
}
WAYS = {
    "gloo": ["--with", "gloo"],
    "mpi": ["--with", "mpi"],
    "mpirun": ["--with", "mpirun"],
    "elastic": ["--elastic"],
    "typed": [],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", WORDS)
def test_the_first_cause_is_named_at_the_end(way: str, how: str, tmp_path: Path) -> None:
    """In at most ten lines, besides those of the training."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    launch = ["hvd-train", "launch", *WAYS[way], "--np", "2", "--", sys.executable]
    if way == "typed":
        launch = ["horovodrun", "--mpi", "-np", "2", sys.executable]
    code, output = finished([*launch, "mine.py", how], tmp_path)
    of_training = ("custom", "epoch", "done", "files", "next")
    lines = [
        line
        for line in output.splitlines()
        if line.rpartition("<stderr>:")[2] and not line.startswith(of_training)
    ]
    print(output)
    assert any(word in output for word in WORDS[how])
    if way == "elastic":  # the others go on
        assert code == 0
        assert "worker localhost[1]" in output
    else:
        assert code not in (0, 2)
        assert "rank 1" in lines[-1]
    assert len(lines) <= 10
    assert "UCX" not in output and "Primary job" not in output
