"""A launcher that may open 1,024 files: more ranks meet than may wait in its store at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvd_train.launch import client

LIMIT, RANKS, LONG_S = 1024, 300, 60
STORE = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
from horovod.runner.http.http_server import RendezvousServer
store = RendezvousServer()
store.start(address="127.0.0.1")
store.init([])
print(store._httpd.server_port, flush=True)
sys.stdin.read()
store.stop()
"""


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Where a store is that has a process of its own, with the limit."""
    with subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as store:
        assert store.stdout is not None
        assert store.stdin is not None
        yield {client.ADDRESS: "127.0.0.1", client.PORT: store.stdout.readline().decode().strip()}
        store.stdin.close()


def test_more_ranks_meet_than_may_wait(environ: dict[str, str]) -> None:
    """A quarter of the open files may wait; the other ranks ask again, as ranks do, and all learn of one another."""
    sent_away, all_have_come = threading.Event(), threading.Event()

    def put(rank: int) -> None:
        client.put(environ, f"global/row.{rank}.of.{RANKS}", f"{rank:03};" * RANKS, LONG_S)

    def column(rank: int) -> str:
        while True:
            try:
                return client.get(environ, f"global/column.{rank}.of.{RANKS}", LONG_S, wait_s=30)
            except urllib.error.HTTPError as error:
                assert error.code == 404
                sent_away.set()
                all_have_come.wait(0.1)  # as a rank pauses between two questions

    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(put, range(RANKS - 1)))
        answers = [threads.submit(column, rank) for rank in range(RANKS - 1)]
        assert sent_away.wait(LONG_S), "fewer wait than may: this shows nothing"
        assert not any(answer.done() for answer in answers)
        put(RANKS - 1)
        all_have_come.set()
        columns = {answer.result(LONG_S) for answer in [*answers, threads.submit(column, RANKS - 1)]}
    assert columns == {"".join(f"{rank:03};" for rank in range(RANKS))}
