"""C1: after shutdown() no connection to a peer is open; prints the number of open ones."""

import os
import time

import horovod.torch as hvd
import psutil
import torch

hvd.init()
hvd.allreduce(torch.ones(1), name="warm-up")
hvd.shutdown()
deadline = time.monotonic() + 3
while True:
    connections = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.status == "ESTABLISHED"]
    if not connections or time.monotonic() > deadline:
        break
    time.sleep(0.05)
os.write(1, f"OPEN {len(connections)}\n".encode())  # at once: two of them write
time.sleep(max(0.0, deadline - time.monotonic()))  # the peer's end must not close ours
os._exit(0)
