"""L1: a worker that trains until it is stopped; WHAT says what rank 1 does to itself.

Each worker writes `FOLDER/pid.RANK`, and for every SIGTERM a line to `FOLDER/term.RANK`; then it takes half a second
to finish, as a commit does, and ends with 143, or with 0 where WHAT=finish. With WHAT=ignore it does not end.
"""

import os
import signal
import time
from pathlib import Path

import horovod.torch as hvd
import torch

hvd.init()
torch.set_num_threads(1)
folder, what, rank = Path(os.environ["FOLDER"]), os.environ["WHAT"], hvd.rank()
stop = False


def on_term(signum: int, frame: object) -> None:
    global stop
    stop = True
    with (folder / f"term.{rank}").open("a") as file:
        file.write(f"{signum}\n")


signal.signal(signal.SIGTERM, on_term)
for step in range(3):
    hvd.allreduce(torch.ones(1), name=f"step {step}")
# Only now: a signal that finds one rank in an operation, and the other out of it, is another test's case.
(folder / f"pid.{rank}").write_text(str(os.getpid()))
deadline = time.monotonic() + 200
while time.monotonic() < deadline and not (stop and what != "ignore"):
    if rank == 1 and what == "exit 7":
        os._exit(7)
    elif rank == 1 and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(0.02)
if stop:
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        time.sleep(0.02)
    (folder / f"committed.{rank}").write_text("yes")
os._exit(128 + signal.SIGTERM if stop and what != "finish" else 0)
