"""What ranks cost as they become more: the time in which they connect, requests to the store, and a sum of one number.

The worlds have 2 to 32 ranks on this machine. For 1,024 ranks, clients ask the store as ranks do, and do not connect.

    python -m benchmarks.growth             about three minutes on 2 cores
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.turns import ENVIRONMENT, write
from hvd_train.launch import client

RANKS = (2, 4, 8, 16, 32)
SUMS = 300
CLIENTS, ADDRESS = 1024, 168  # bytes of Gloo's address of a rank


def launch() -> None:
    """Run horovodrun's command line, and print the number of requests that its store answers."""
    from horovod.runner import launch
    from horovod.runner.http.http_server import KVStoreHandler

    answered, answer = [], KVStoreHandler._answer
    KVStoreHandler._answer = lambda self, *result: (answered.append(self.path), answer(self, *result))
    launch.run_commandline()
    print(json.dumps({"requests": len(answered)}))


def rank() -> None:
    """Wait until all ranks are ready, connect, and sum; rank 0 prints the seconds of both."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    folder, number, ranks = Path.cwd(), os.environ["HOROVOD_RANK"], int(os.environ["HOROVOD_SIZE"])
    (folder / number).touch()
    while len(list(folder.iterdir())) < ranks:
        time.sleep(0.1)
    begun = time.perf_counter()
    hvd.init()
    own = time.perf_counter() - begun
    longest = hvd.allreduce(torch.tensor(own), op=hvd.Max).item()
    one, begun = torch.ones(1), time.perf_counter()
    for _ in range(SUMS):
        hvd.allreduce_(one, name="one")
    if number == "0":
        print(json.dumps({"connect_s": longest, "sum_s": (time.perf_counter() - begun) / SUMS}))


def ask(number: int) -> None:
    """Ask the store as one of `CLIENTS` ranks does: write its own addresses, and read those that others have for it."""
    client.put(os.environ, f"global/{number}", " " * ADDRESS * (CLIENTS - 1))
    while not client.get(os.environ, f"global/{number}-of-{CLIENTS}"):
        pass  # not all are here yet


def clients() -> dict[str, Any]:
    """Return the seconds that a store takes to serve `CLIENTS` ranks, whose requests come from another process."""
    from horovod.runner.http import http_server, signature

    os.environ |= {client.KEY: signature.make_key(), client.ADDRESS: client.LOOPBACK}
    os.environ[client.PORT] = str(http_server.RendezvousServer().start(address=client.LOOPBACK))
    command = [sys.executable, "-m", "benchmarks.growth", "clients"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    print(found := {"clients": CLIENTS, "seconds": round(float(done.stdout), 2)}, flush=True)
    return found


def measure(ranks: int) -> dict[str, Any]:
    """Return what so many ranks cost."""
    command = [sys.executable, "-m", "benchmarks.growth"]
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        start = [*command, "launch", "--gloo", "-np", str(ranks), *command, "rank"]
        done = subprocess.run(start, cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = {"ranks": ranks}
    for line in done.stdout.splitlines():
        found |= json.loads(line[line.index("{") :])
    print(found, flush=True)
    return found


if __name__ == "__main__":
    what = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if what == "clients":
        begun = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(ask, range(CLIENTS)))
        print(time.monotonic() - begun)
    elif what:
        {"rank": rank, "launch": launch}[what]()
    else:
        write("growth", "benchmarks.growth", worlds=[measure(ranks) for ranks in RANKS], store=clients())
