"""C10: rank 1 comes two seconds late; rank 0 fails if waiting for it takes processor time."""

import sys
import time

import horovod.torch as hvd
import torch

hvd.init()
rank = hvd.rank()
hvd.allreduce(torch.ones(1), name="sum")
if rank == 1:
    time.sleep(2)
start = time.thread_time()
hvd.allreduce(torch.ones(1), name="sum")
took = time.thread_time() - start
hvd.shutdown()
if took > 0.2:
    sys.exit(f"rank {rank} waited busily for {took:.1f} s")
