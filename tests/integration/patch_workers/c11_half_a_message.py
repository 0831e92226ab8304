"""C11: rank 1 dies while half of a message is under way; rank 0 ends with exit code 0 if it hears of that at once.

SENDER is the rank that sends: rank 0 has a part of the message of a dead sender, or has sent a part to a dead receiver.
"""

import os
import signal
import time

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

sender = int(os.environ["SENDER"])
hvd.init()
rank = hvd.rank()
pids = hvd.allgather_object(os.getpid(), name="pids")
hvd.allreduce(torch.ones(1), name="warm-up")
message = torch.full([2**27], float(rank == sender))  # 512 MB, of which a few are on their way at a time
first, last = message[:1].numpy(), message[-1:].numpy()
handle = hvd.broadcast_async_(message, sender, name="message")
if rank != sender:
    while not first[0]:  # by the thread that receives
        pass
    os.kill(pids[1], signal.SIGKILL)
start = time.monotonic()
code = 3
try:
    hvd.synchronize(handle)
except HorovodInternalError:
    code = 0 if time.monotonic() - start < 5 else 4
if rank != sender and last[0]:
    code = 5  # all of it has come before the sender died
os._exit(code)
