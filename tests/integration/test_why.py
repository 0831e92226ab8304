"""`hvd-train why` names what holds two real ranks."""

import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.launching import HVD_TRAIN, launch_line, output_of, started, wait_for

pytestmark = pytest.mark.integration
slow = pytest.mark.slow

# Rank 1 hangs where the line that ends with `# NAME` is, once the file `hang` exists.
PROGRAM = """
import os, pathlib, re, sys, threading
import torch
import torch.nn.functional as F
import hvd_train

how = sys.argv.pop(1)
of_rank = os.environ["HOROVOD_RANK"]

def is_due(name):
    due = how == name and of_rank == "1" and os.path.exists("hang")
    if due:
        pathlib.Path("hangs").touch()
    return due

def wait_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # NAMES

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, number):
        if is_due("loader"):
            wait_twice()
        if is_due("fifo"):
            open("fifo").read()  # fifo
        return torch.full((20,), number / 640), number % 2

class Net(torch.nn.Linear):
    def forward(self, x):
        if is_due("lock"):
            wait_twice()
        if is_due("loop"):
            while True: pass  # loop
        if is_due("regex"):
            re.match("(a+)+$", "a" * 60 + "b")  # regex
        return super().forward(x)

def measure(model, batch):
    return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}

def main():
    _, config = hvd_train.parse_args(
        epochs=10**5, global_batch_size=64, batch_size=32, workers=1, output_dir=pathlib.Path("run")
    )
    model = Net(20, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hvd_train.Session(model, optimizer, Data(), config=config) as session:
        for step in session.steps():
            for micro in step:  # train
                micro.backward(**measure(model, micro.batch))
            if not is_due("skip"):
                session.evaluate(Data(), measure)  # evaluate

main()
""".replace("# NAMES", "# loader lock")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("loader", "is waiting for its loader process, which is in {loader} (wait_twice); "),
        ("skip", "in {evaluate} (main) (the evaluation after step"),
        pytest.param("stop", "is stopped; type there: kill -CONT ", marks=slow),
        pytest.param("lock", "is in {lock} (wait_twice); ", marks=slow),
        pytest.param(
            "fifo",
            "is waiting for its loader process, which is in {fifo} (__getitem__); ",
            marks=slow,
        ),
        pytest.param("loop", "is in {loop} (forward); ", marks=slow),
        pytest.param("regex", "is in {regex} (forward); ", marks=slow),
    ],
)
def test_what_holds_a_rank_is_named(how: str, words: str, tmp_path: Path) -> None:
    """`why` names it, and so does the job by itself, once; Horovod does not name tensors besides.

    The places are those of both ranks, if they do different things.
    """
    (tmp_path / "mine.py").write_text(PROGRAM)
    os.mkfifo(tmp_path / "fifo")
    command = launch_line("gloo", 2, sys.executable, "mine.py", how)
    lines = enumerate(PROGRAM.splitlines(), 1)
    places = {name: f"mine.py:{n}" for n, text in lines for name in text.partition("# ")[2].split()}
    said = [""]

    def why() -> str:
        said[0] = output_of([HVD_TRAIN, "why", "run"], tmp_path).partition("\n")[0]
        return said[0]

    job = tmp_path / "job.txt"
    with started(command, tmp_path, job, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2"}):
        wait_for("steps", (tmp_path / "run/ranks.json").exists)
        if how == "stop":
            wait_for("a job that trains", lambda: why().startswith("the job trains: step "))
            members = json.loads((tmp_path / "run/ranks.json").read_text())
            os.kill(members[1]["process"], signal.SIGSTOP)
        else:
            (tmp_path / "hang").touch()
            wait_for("the hang", (tmp_path / "hangs").exists)
        expected = words.format(**places)
        with suppress(AssertionError):
            wait_for("the answer", lambda: expected in why(), limit_s=60)
        by_itself = re.compile(rf"hvd-train: .*{re.escape(expected)}")
        wait_for("the notice", lambda: by_itself.search(job.read_text()))
    printed = job.read_text()
    assert len(by_itself.findall(printed)) == 1
    assert "One or more tensors" not in printed
    assert expected in said[0]
    if how == "skip":
        assert f"in {places['train']} (main) (step " in said[0]
    else:
        assert re.match(r"rank 1 on .*; rank 0 on \S+ waits for it$", said[0])
