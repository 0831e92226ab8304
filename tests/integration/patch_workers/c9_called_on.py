"""C9: rank 0 writes to the file TOOK how many seconds five sums take in which rank 1 has no part.

WHAT is the reason: the sums are over a process set without rank 1, or rank 1 has joined.
"""

import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch

part = hvd.ProcessSet([0])
joins = os.environ["WHAT"] == "join"
hvd.init(process_sets=[] if joins else [part])
hvd.allreduce(torch.ones(1), name="ready")
if hvd.rank() == 0:
    start = time.monotonic()
    for _ in range(5):
        hvd.allreduce(torch.ones(1), name="sum", process_set=hvd.global_process_set if joins else part)
    Path(os.environ["TOOK"]).write_text(str(time.monotonic() - start))
hvd.join()
hvd.shutdown()
