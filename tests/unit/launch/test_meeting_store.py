"""How ranks learn one another's addresses from the launcher's store: each asks once, and the store waits."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from horovod.runner.http.http_server import RendezvousServer

from hvd_train.launch import client

LONG_S = 60


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    """A store as launchers have it."""
    store = RendezvousServer()
    store.start(address="127.0.0.1")
    store.init([])
    yield store
    store.stop()


@pytest.fixture
def environ(server: RendezvousServer) -> dict[str, str]:
    """Where it is."""
    return {client.ADDRESS: "127.0.0.1", client.PORT: str(server._httpd.server_port)}


def waiting(server: RendezvousServer, scope: str) -> int:
    """Return for how many names of a scope somebody waits."""
    return len(server._httpd.awaited.get(scope, ()))


def test_each_rank_learns_of_each_other_with_one_question(server: RendezvousServer, environ: dict[str, str]) -> None:
    """A rank writes where it waits for each other one, and gets where each other one waits for it."""
    ranks = range(40)

    def meet(rank: int) -> list[str]:
        client.put(environ, f"global/row.{rank}.of.40", "".join(f"{rank:02}->{other:02};" for other in ranks), LONG_S)
        return client.get(environ, f"global/column.{rank}.of.40", LONG_S, wait_s=30).split(";")[:-1]

    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(meet, ranks))
    assert found == [[f"{other:02}->{rank:02}" for other in ranks] for rank in ranks]


def test_who_asks_early_is_answered_when_something_comes(server: RendezvousServer, environ: dict[str, str]) -> None:
    """Not before, and not by asking again."""
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.get, environ, "hvd_train/verdict.0", LONG_S, 30)
        while not waiting(server, "hvd_train"):
            assert not answer.done()
        client.put(environ, "hvd_train/here.0.1", "another name", LONG_S)
        assert not answer.done()
        client.put(environ, "hvd_train/verdict.0", "go", LONG_S)
        assert answer.result(timeout=20) == "go"


def test_the_store_does_not_wait_for_ever(environ: dict[str, str]) -> None:
    """Who waits hears within the time that it has named that nothing has come."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        client.get(environ, "hvd_train/verdict.0", LONG_S, wait_s=1)
    assert refused.value.code == 404


def test_who_waits_for_an_old_world_is_let_go(server: RendezvousServer, environ: dict[str, str]) -> None:
    """When an elastic job forms another world, its store begins anew."""
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.get, environ, "global/column.0.of.2", LONG_S, 30)
        while not waiting(server, "global"):
            assert not answer.done()
        server.init([])
        with pytest.raises(urllib.error.HTTPError) as refused:
            answer.result(timeout=20)
    assert refused.value.code == 404


@pytest.mark.parametrize("name", ["column.2.of.2", "column.0.of.3", "column.x.of.2"])
def test_what_is_no_column_is_not_there(environ: dict[str, str], name: str) -> None:
    """A rank beyond the world, a world of another size, and no number."""
    for rank in range(2):
        client.put(environ, f"global/row.{rank}.of.2", "abcd", LONG_S)
    with pytest.raises(urllib.error.HTTPError) as refused:
        client.get(environ, f"global/{name}", LONG_S)
    assert refused.value.code == 404
