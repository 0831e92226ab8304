"""C8: the last rank dies while the others wait for its numbers; they fail if they do not notice it soon."""

import os
import signal
import time

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

hvd.init()
hvd.allreduce(torch.ones(1), name="all are here")
if hvd.rank() == hvd.size() - 1:
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    hvd.allreduce(torch.ones(1_000_000), name="without the last")
except HorovodInternalError:
    # A third of the time limit: the machine may be busy.
    os._exit(0 if time.monotonic() - start < float(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"]) / 3 else 4)
os._exit(3)
