"""C4: rank 1 submits a tensor only after Horovod has reported that it is missing."""

import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch

hvd.init()
reported = Path(os.environ["REPORTED"])
if hvd.rank() == 1:
    deadline = time.monotonic() + 12
    while not reported.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
hvd.allreduce(torch.ones(1), name="late tensor")
os.write(1, f"DONE {hvd.rank()}\n".encode())
