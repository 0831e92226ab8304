"""C2: rank 1 falls silent (SIGSTOP); rank 0 prints after how many seconds its operation fails."""

import os
import signal
import time

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

hvd.init()
pids = hvd.allgather_object(os.getpid(), name="pids")
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
start = time.monotonic()
try:
    hvd.allreduce(torch.ones(1000), name="with a silent peer")
except HorovodInternalError:
    print(f"FAILED AFTER {time.monotonic() - start:.1f}", flush=True)
os.kill(pids[1], signal.SIGKILL)
os._exit(0)
