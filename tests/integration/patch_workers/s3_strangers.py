"""S3: while ranks meet, strangers connect to all their ports; exit code 0 if the ranks find each other all the same.

A stranger says nothing, or a part of what a peer would say, or something else, and stays.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import horovod.torch as hvd
import psutil
import torch

SAYS = (b"", b"\0" * 8, b"\0" * 16, os.urandom(100))
own = psutil.Process()
rank, folder = int(os.environ["HOROVOD_RANK"]), Path(os.environ["FOLDER"])
visited: dict[int, list[socket.socket]] = {}
met = threading.Event()


def ports(process: psutil.Process) -> set[int]:
    return {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def visit(process: psutil.Process) -> None:
    for port in ports(process) - {*visited}:
        visited[port] = []
        for says in SAYS * 10:
            with suppress(OSError):
                visited[port].append(socket.create_connection(("127.0.0.1", port), 5))
                visited[port][-1].sendall(says)


def visit_own_ports() -> None:
    while not met.is_set():
        visit(own)


(folder / "new").mkdir(exist_ok=True)
(folder / "new" / str(rank)).write_text(str(own.pid))
(folder / "new" / str(rank)).rename(folder / str(rank))
if rank > 0:  # all before are there already, and wait
    first = folder / "0"
    while not first.exists() or not ports(psutil.Process(int(first.read_text()))):
        time.sleep(0.01)
    visit(psutil.Process(int(first.read_text())))
else:
    threading.Thread(target=visit_own_ports, daemon=True).start()
hvd.init()
met.set()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="sum")
os.write(1, f"VISITED {len(visited)}\n".encode())
os._exit(0 if total == hvd.size() else 4)
