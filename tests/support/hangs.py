"""Hangs of a rank, and what `hvd-train why` says about them."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.launching import output_of, started, wait_for

# Rank 1 hangs where the line that ends with `# NAME` is, once the file `hang` exists.
PROGRAM = """
import os, pathlib, re, sys, threading
import torch
import torch.nn.functional as F
import hvd_train

way, how = sys.argv[1:3]
del sys.argv[1:3]
is_rank_1 = os.uname().nodename == "h2" or os.environ.get("HOROVOD_RANK") == "1"

def is_due(name):
    due = how == name and is_rank_1 and os.path.exists("hang")
    if due:
        pathlib.Path("hangs").touch()
    return due

def wait_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # NAMES

class Data(torch.utils.data.Dataset):
    def __init__(self):
        if is_due("start"):
            wait_twice()

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
    if way == "train":
        return hvd_train.train(config, model=lambda _: Net(20, 2), data=lambda _: (Data(), None))
    data = Data()
    model = Net(20, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hvd_train.Session(model, optimizer, data, config=config) as session:
        for step in session.steps():
            for micro in step:  # train
                micro.backward(**measure(model, micro.batch))
            if not is_due("skip"):
                session.evaluate(data, measure)  # evaluate

main()
""".replace("# NAMES", "# loader lock start")
LOADER = "is waiting for its loader process, which is in "
ANSWERS = {
    "loader": f"{LOADER}{{loader}} (wait_twice); ",
    "lock": "is in {lock} (wait_twice); ",
    "stop": "is stopped; type there: kill -CONT ",
    "cut": "is out of reach: ",
    "parted": "",
    "fifo": f"{LOADER}{{fifo}} (__getitem__); ",
    "skip": "in {evaluate} (main) (the evaluation after step",
    "loop": "is in {loop} (forward); ",
    "regex": "is in {regex} (forward); ",
    "start": "is in {start} (wait_twice); it started ",
}
PLACES = {
    name: f"mine.py:{number}"
    for number, text in enumerate(PROGRAM.splitlines(), 1)
    for name in text.partition("# ")[2].split()
}


def _expected(how: str, host: str) -> str:
    """Return the pattern of the first line of the answer."""
    words = re.escape(ANSWERS[how].format(**PLACES))
    if how == "parted":
        return r"rank 0 on h3 gets no answer from \S+\.2|rank 1 on node2 gets no answer from \S+\.3"
    if how == "skip":
        training = rf"in {PLACES['train']} \(main\) \(step "
        return f"{training}.*{words}|{words}.*{training}"
    return rf"rank 1 on {host} {words}.*; rank 0 on \S+ waits for it"


def check_answer(
    how: str,
    folder: Path,
    job: Sequence[str],
    why: Sequence[str],
    host: str = r"\S+",
    act: Callable[[], object] | None = None,
) -> None:
    """Assert that the command `why` names a hang of rank 1 of this job, which `act` or else its
    program makes, and that the job does so by itself, once; Horovod names no tensors besides.
    """
    (folder / "mine.py").write_text(PROGRAM)
    os.mkfifo(folder / "fifo")
    said = [""]
    expected = _expected(how, host)

    def says(pattern: str) -> bool:
        said[0] = output_of([*why], folder).partition("\n")[0]
        return re.search(pattern, said[0]) is not None

    def notices() -> list[str]:
        return re.findall(f"hvd-train: .*(?:{expected})", (folder / "job.txt").read_text())

    with started([*job], folder, folder / "job.txt", {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2"}):
        if how != "start":
            wait_for("steps", (folder / "run/ranks.json").exists)
        if act is not None:
            wait_for("a job that trains", lambda: says("the job trains: step "))
            act()
        else:
            (folder / "hang").touch()
            wait_for("the hang", (folder / "hangs").exists)
        failed = ""
        try:
            wait_for("the answer", lambda: says(expected), limit_s=60)
            wait_for("the notice", lambda: notices() or how in ("parted", "start"), limit_s=60)
        except AssertionError as error:
            failed = f"{error}"
    printed = (folder / "job.txt").read_text()
    assert re.search(expected, said[0]), [failed, *said, printed]
    assert len(notices()) == (0 if how in ("parted", "start") else 1), printed
    assert "One or more tensors" not in printed
