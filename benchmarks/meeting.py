"""How ranks meet: the seconds, and the requests to the launcher's store, from `hvd.init()` to the first sum.

    python -m benchmarks.meeting --json benchmarks/records/meeting.json       about a minute on 2 cores

The ranks are processes of this machine that have imported Horovod before the clock starts. With many more ranks than
cores they take turns, also in the sums that are timed afterwards. The clients are as many as a large job has ranks: all
of them are in one process, which does what ranks do to learn one another's addresses, and connects to none.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.record import about, show

RANKS, CLIENTS = (2, 4, 8, 16, 32), 1024
AIMS = {"32 ranks": 2.0, "1024 clients": 5.0}
SUMS, LIMIT_S = 50, 300
ADDRESS_BYTES = 192  # of one rank, as Gloo writes it
KEY = "0123456789abcdef" * 4
OK, RETRY_S = 200, 0.5
FORK = mp.get_context("fork")  # the import is not what is measured


def serve(pipe: Connection, size: int) -> None:
    """Run a store for so many ranks; send its port, and when asked the requests that it has had and its seconds."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer

    _open_many_files()
    requests, lock = 0, threading.Lock()

    class Counting(RendezvousHandler):  # type: ignore[misc]  # Horovod has no types
        def parse_request(self) -> bool:
            nonlocal requests
            with lock:
                requests += 1
            found: bool = super().parse_request()
            return found

    store = RendezvousServer()
    pipe.send(store.start(Counting, "127.0.0.1"))
    store.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))
    pipe.recv()
    pipe.send((requests, time.process_time()))


def _open_many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Store:
    """A store in a process of its own."""

    def __init__(self, size: int) -> None:
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=serve, args=(theirs, size))
        self._process.start()
        self.port: int = self._pipe.recv()

    def end(self) -> tuple[int, float]:
        """End it, and return the requests that it has had and its seconds of processor time."""
        self._pipe.send("end")
        requests, busy_s = self._pipe.recv()
        self._process.join()
        return requests, busy_s


def rank(environ: Mapping[str, str], pipe: Connection) -> None:
    """Be a rank: send the seconds until it has met the others, and those of a sum of a few numbers."""
    import horovod.torch as hvd
    import torch

    os.environ.update(environ)
    torch.set_num_threads(1)
    begun = time.perf_counter()
    hvd.init()
    met = time.perf_counter()
    numbers = torch.ones(16)
    for _ in range(SUMS):
        hvd.allreduce_(numbers, name="numbers", op=hvd.Sum)
    pipe.send((met - begun, (time.perf_counter() - met) / SUMS))
    pipe.recv()
    hvd.shutdown()
    os._exit(0)


def ranks_meet(size: int) -> dict[str, Any]:
    """Let so many ranks meet. Raises TimeoutError where they do not."""
    answers, requests = answers_of(size, rank)
    return {
        "seconds": round(max(seconds for seconds, _ in answers), 2),
        "requests": requests,
        "milliseconds of a small sum": round(1000 * statistics.median(each for _, each in answers), 2),
    }


def answers_of(size: int, body: Callable[[Mapping[str, str], Connection], None], **more: str) -> tuple[list[Any], int]:
    """Run so many ranks; return what the `body` of each sends, and the requests to the store.

    A body takes its environment, to which `more` belongs, and ends when it is told to. Raises TimeoutError where an
    answer does not come.
    """
    store = Store(size)
    environ = {
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store.port),
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(LIMIT_S),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **more,
    }
    pipes = [FORK.Pipe() for _ in range(size)]
    processes = [
        FORK.Process(
            target=body, args=({**environ, "HOROVOD_RANK": str(number), "HOROVOD_LOCAL_RANK": str(number)}, end)
        )
        for number, (_, end) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        answers = []
        for pipe, _ in pipes:
            if not pipe.poll(LIMIT_S):
                raise TimeoutError(f"{size} ranks have not met within {LIMIT_S} s")
            answers.append(pipe.recv())
        for pipe, _ in pipes:
            pipe.send("end")
    finally:
        for process in processes:
            process.kill() if sys.exc_info()[0] else process.join()
        requests, _ = store.end()
    return answers, requests


def _signed(method: str, path: str, body: bytes = b"", wait_s: int = 0) -> bytes:
    """Return a request as ranks send it."""
    from hvd_train.launch import signature

    lines = {**signature.headers({signature.KEY: KEY}, method, path, body), "Content-Length": str(len(body))}
    if wait_s:
        lines["Horovod-Wait"] = str(wait_s)
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.0\r\n{head}\r\n".encode() + body


async def _answer(port: int, request: bytes) -> tuple[int, bytes]:
    """Send a request, and return the status and the body of the answer; status 0 where there is none."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await writer.drain()
        answer = await reader.read(-1)
        writer.close()
    except ConnectionError:
        return 0, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]), body) if head else (0, b"")


async def _client(port: int, number: int, size: int, put: bytes) -> int:
    """Do what a rank does: try again where the connection breaks, and ask again where others are missing."""
    while (await _answer(port, put))[0] != OK:
        await asyncio.sleep(RETRY_S)
        put = _signed("PUT", f"/global/row.{number}.of.{size}", put.partition(b"\r\n\r\n")[2])
    status, column = 0, b""
    while status != OK:
        status, column = await _answer(port, _signed("GET", f"/global/column.{number}.of.{size}", wait_s=5))
    await _answer(port, _signed("DELETE", f"/global/{number}"))
    return len(column)


def clients_meet(size: int) -> dict[str, Any]:
    """Let so many clients learn one another's addresses."""

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*[_client(port, number, size, put) for number, put in enumerate(puts)])

    row = bytes(size * ADDRESS_BYTES)
    puts = [_signed("PUT", f"/global/row.{number}.of.{size}", row) for number in range(size)]
    _open_many_files()
    os.environ["HOROVOD_RENDEZVOUS_KEY"] = KEY
    store = Store(size)
    port = store.port
    begun = time.perf_counter()
    lengths = asyncio.run(all_of_them())
    seconds = time.perf_counter() - begun
    if set(lengths) != {size * ADDRESS_BYTES}:
        raise ValueError("the clients have not got one another's addresses")
    requests, busy_s = store.end()
    return {"seconds": round(seconds, 2), "requests": requests, "processor seconds of the store": round(busy_s, 2)}


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--clients", type=int, nargs="*", default=[CLIENTS])
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    found = {f"{size} clients": clients_meet(size) for size in options.clients}
    os.environ.pop("HOROVOD_RENDEZVOUS_KEY", None)
    import horovod.torch  # noqa: F401  # before the ranks are forked

    found |= {f"{size} ranks": ranks_meet(size) for size in options.ranks}
    for name, aim in AIMS.items():
        if name in found:
            verdict = "met" if found[name]["seconds"] < aim else "not met"
            found[name] |= {"aim": f"under {aim} s", "verdict": verdict}
    show({**about("benchmarks.meeting", sys.argv[1:]), **found}, options.json)


if __name__ == "__main__":
    main()
