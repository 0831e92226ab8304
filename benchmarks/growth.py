"""What ranks cost as they become more: the time in which they connect, requests to the
store, and a sum of one number.

The worlds have 2 to 32 ranks on this machine. For 1,024 ranks, clients ask the store as ranks do,
and do not connect. For 1,024 workers of an elastic job, clients send heartbeats to a driver, and a
rank reads the reports of all.

    python -m benchmarks.growth             about three minutes on 2 cores
    python -m benchmarks.growth elastic     half a minute: the driver and the reports alone
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.turns import ENVIRONMENT, write
from hvd_train.launch import client

RANKS = (2, 4, 8, 16, 32)
SUMS = 300
CLIENTS = 1024
ADDRESS = 168  # bytes of Gloo's address of a rank
BEATS = 10
PROGRAM = [sys.executable, "-m", "benchmarks.growth"]


def launch() -> None:
    """Run horovodrun's command line, and print the number of requests that its store answers."""
    from horovod.runner import launch
    from horovod.runner.http.http_server import KVStoreHandler

    answered = []
    answer = KVStoreHandler._answer
    KVStoreHandler._answer = lambda self, *result: (
        answered.append(self.path),
        answer(self, *result),
    )
    launch.run_commandline()
    print(json.dumps({"requests": len(answered)}))


def rank() -> None:
    """Wait until all ranks are ready, connect, and sum; rank 0 prints the seconds of both."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    folder = Path.cwd()
    number = os.environ["HOROVOD_RANK"]
    ranks = int(os.environ["HOROVOD_SIZE"])
    (folder / number).touch()
    while len(list(folder.iterdir())) < ranks:
        time.sleep(0.1)
    begun = time.perf_counter()
    hvd.init()
    own = time.perf_counter() - begun
    longest = hvd.allreduce(torch.tensor(own), op=hvd.Max).item()
    one = torch.ones(1)
    begun = time.perf_counter()
    for _ in range(SUMS):
        hvd.allreduce_(one, name="one")
    if number == "0":
        print(json.dumps({"connect_s": longest, "sum_s": (time.perf_counter() - begun) / SUMS}))


def ask(number: int) -> None:
    """Ask the store as one of `CLIENTS` ranks does: write its own addresses, and read
    those that others have for it.
    """
    client.put(os.environ, f"global/{number}", " " * ADDRESS * (CLIENTS - 1))
    while not client.get(os.environ, f"global/{number}-of-{CLIENTS}"):
        pass  # not all are here yet


def clients() -> None:
    """Ask the store as `CLIENTS` ranks do, and print the seconds."""
    begun = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(ask, range(CLIENTS)))
    print(time.monotonic() - begun)


def serve(start: Callable[[], int]) -> None:
    """Start a server, which returns its port, for the clients of this environment."""
    from horovod.runner.http import signature

    os.environ |= {client.KEY: signature.make_key(), client.ADDRESS: client.LOOPBACK}
    os.environ[client.PORT] = str(start())


def store() -> dict[str, Any]:
    """Return the seconds that a store takes to serve `CLIENTS` ranks, whose requests
    come from another process.
    """
    from horovod.runner.http.http_server import RendezvousServer

    serve(partial(RendezvousServer().start, address=client.LOOPBACK))
    done = subprocess.run([*PROGRAM, "clients"], check=True, stdout=subprocess.PIPE)
    return {"clients": CLIENTS, "seconds": round(float(done.stdout), 2)}


def beat() -> None:
    """Send heartbeats as `CLIENTS` workers do: begin, and on a line of input take `BEATS`
    seconds for some of each.
    """
    held = [
        client.HeldRequest(os.environ, f"heartbeat/{1000 + n}-train.1", 60) for n in range(CLIENTS)
    ]
    for each in held:
        each.beat()
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.monotonic()
    for second in range(BEATS):
        for each in held:
            each.beat()
        time.sleep(max(0.0, begun + second + 1 - time.monotonic()))
    print("done", flush=True)
    sys.stdin.readline()


def driver() -> dict[str, Any]:
    """Return the share of a core that a driver takes for a world of `CLIENTS` workers."""
    from hvd_train.elastic import roster
    from hvd_train.elastic.dispatcher import Dispatcher
    from hvd_train.elastic.driver import DriverServer, handler
    from hvd_train.elastic.roster import Roster, Worker

    def run(worker: Worker, variables: Mapping[str, str], end: threading.Event) -> int:
        end.wait()
        return 0

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    roster.SILENT_S = 600.0  # until all clients have connected
    hosts = {f"h{n}": 8 for n in range(CLIENTS // 8)}
    server = DriverServer()
    interrupted = threading.Event()
    job = Dispatcher(
        Roster(CLIENTS, 1, CLIENTS, patience_s=600), lambda: hosts, lambda _: None, run, interrupted
    )
    serve(partial(server.start, handler(job, server)))
    threading.Thread(target=job.run, daemon=True).start()
    while "end" in (job.heartbeat_received(1000 + number) for number in range(CLIENTS)):
        time.sleep(0.1)  # not all have started yet
    with ThreadPoolExecutor(CLIENTS) as threads:
        assert all(threads.map(job.wait_for_ranks, range(1000, 1000 + CLIENTS)))
    pipe = subprocess.PIPE
    with subprocess.Popen([*PROGRAM, "beat"], stdin=pipe, stdout=pipe, text=True) as workers:
        assert workers.stdin is not None
        assert workers.stdout is not None
        workers.stdout.readline()
        used = time.process_time()
        print(file=workers.stdin, flush=True)
        assert workers.stdout.readline() == "done\n"
        core = (time.process_time() - used) / BEATS
    return {"workers": CLIENTS, "core": round(core, 3)}


def reports() -> dict[str, Any]:
    """Return the seconds in which a rank reads the reports of `CLIENTS` ranks at a rendezvous."""
    from hvd_train.membership import Member, RankReport
    from hvd_train.world.wire import packed, unpacked

    member = Member("node-0001.cluster.example", 10_000)
    facts = {"digest": "d" * 32, "reason": "a rank was lost", "device": "NVIDIA H200"}
    report = packed(RankReport(member, step=100, run_dir=Path("runs/one"), **facts))
    begun = time.monotonic()
    for _ in range(CLIENTS):
        unpacked(report)
    return {"reports": CLIENTS, "seconds": round(time.monotonic() - begun, 2)}


def world(ranks: int) -> dict[str, Any]:
    """Return what so many ranks cost."""
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        start = [*PROGRAM, "launch", "--gloo", "-np", str(ranks), *PROGRAM, "rank"]
        done = subprocess.run(
            start, cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True
        )
    found = {"ranks": ranks}
    for line in done.stdout.splitlines():
        found |= json.loads(line[line.index("{") :])
    print(found, flush=True)
    return found


if __name__ == "__main__":
    what = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if what in ("clients", "rank", "launch", "beat"):
        globals()[what]()
    else:
        found = {} if what else {"worlds": [*map(world, RANKS)], "store": store()}
        found |= {"driver": driver(), "reports": reports()}
        print(found)
        if not what:
            write("growth", "benchmarks.growth", **found)
