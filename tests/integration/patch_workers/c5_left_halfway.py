"""C5: an operation fails on rank 0 alone, for lack of memory, while the others are in it; a longer one follows.

What rank 0 sends for the second operation reaches the others as its part of the first, and does not fit. All ranks must
get an exception.
"""

import os
import resource

import horovod.torch as hvd
import psutil
import torch
from horovod.common.exceptions import HorovodInternalError

hvd.init()
others, mine = 20_000_000, 10
first = torch.ones(mine if hvd.rank() == 0 else others)  # rank 0 needs room for the others' parts: 160 MB
second = torch.ones(500_000 if hvd.rank() == 0 else mine)
hvd.allgather(torch.ones(1), name="warm-up")
hvd.barrier()
if hvd.rank() == 0:
    limit = psutil.Process().memory_info().vms + 140_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
handles = [hvd.allgather_async(first, name="first"), hvd.allgather_async(second, name="second")]
try:
    for handle in handles:
        hvd.synchronize(handle)
except HorovodInternalError:
    hvd.shutdown()
    os.write(1, b"EXCEPTION\n")
    os._exit(0)
os._exit(3)
