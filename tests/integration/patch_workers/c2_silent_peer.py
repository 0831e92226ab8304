"""C2: rank 1 stops (SIGSTOP); rank 0 ends with exit code 0 if its operation fails in time."""

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
code = 3
try:
    hvd.allreduce(torch.ones(1000), name="with a silent peer")
except HorovodInternalError:
    code = 0 if 1.5 <= time.monotonic() - start < 10 else 4
os.kill(pids[1], signal.SIGKILL)
os._exit(code)
