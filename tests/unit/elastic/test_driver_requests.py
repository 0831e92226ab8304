"""What workers and ranks ask of the driver through Horovod's server, and what they are answered."""

from __future__ import annotations

import inspect
import socket
import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO
from horovod.runner.http.http_server import KVStoreHandler, RendezvousServer

from hvd_train.elastic.driver import slot_info
from hvd_train.elastic.ranks import assign_ranks
from hvd_train.elastic.roster import FormWorld
from hvd_train.elastic.worker import Worker
from hvd_train.launch import client, last_word
from hvd_train.launch.last_word import LastWord
from hvd_train.launch.launcher import WORKER
from tests.support.drivers import driver, replacement_of


def test_the_server_has_what_the_handler_overrides() -> None:
    """The methods through which requests pass."""
    handler = replacement_of("create_rendezvous_handler")(driver())
    assert issubclass(handler, KVStoreHandler)
    for name in ("do_GET", "_get_value", "_put_value"):
        assert list(inspect.signature(getattr(KVStoreHandler, name)).parameters) == list(
            inspect.signature(getattr(handler, name)).parameters
        )


def test_requests_of_workers_come_to_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each under its name, with the number of the worker."""
    own, heard = driver(), list[object]()
    names = ("heartbeat_received", "told_to_end", "may_ask", "problem_of", "elsewhere")
    for name in names:
        monkeypatch.setattr(own.dispatcher, name, lambda number, name=name: heard.append((name, number)) or "train")
    handler = replacement_of("create_rendezvous_handler")(own)
    asked = handler.__new__(handler)
    for scope in ("heartbeat", "leaving", "may_ask", "problem", "elsewhere"):
        assert asked._get_value(scope, "1007") == b"train"
    assert heard == [(name, 1007) for name in names]


def test_a_worker_of_another_host_shows_by_which_way_it_came() -> None:
    """With what it runs; from then on the workers here are told its address, by which they choose their interface."""
    own = driver()
    handler = replacement_of("create_rendezvous_handler")(own)
    asked = handler.__new__(handler)
    for sender, known in (("127.0.0.1", ""), ("10.1.0.7", "10.1.0.7"), ("127.0.0.1", "10.1.0.7")):
        asked.client_address = (sender, 34567)
        asked._put_value("facts", "1000", b"{}")
        assert asked._get_value("elsewhere", "1000") == known.encode()


def test_a_workers_words_reach_the_job() -> None:
    """Its last word, and that its ranks have not met."""
    own = driver()
    own.dispatcher._roster.hosts_found({"a": 1})
    own.dispatcher._roster.commands(0.0)
    worker = own.dispatcher._roster.worker(1000)
    assert worker is not None
    server = RendezvousServer()
    environ = {client.ADDRESS: "127.0.0.1", WORKER: "1000"}
    environ[client.PORT] = str(server.start(replacement_of("create_rendezvous_handler")(own)))
    client.put(environ, "not_met/1000", "connection refused", 20)
    assert own.dispatcher._roster._not_met == {1000: "connection refused"}
    assert last_word.say(environ, LastWord(0))
    assert worker.last_word == LastWord(0)
    server.stop()


def test_ranks_do_not_wait_for_the_address_of_a_dead_one() -> None:
    """They ask again for what is not there yet (404), and give up where the answer is another, also while they wait."""
    own = driver()
    roster = own.dispatcher._roster
    roster.hosts_found({"a": 2})
    roster.commands(0.0)
    for number in (1000, 1001):
        roster.rank_requested(number, 0.0)
    assert any(isinstance(command, FormWorld) for command in roster.commands(0.0))
    server = RendezvousServer()
    port = server.start(replacement_of("create_rendezvous_handler")(own))
    environ = {client.ADDRESS: "127.0.0.1", client.PORT: str(port)}

    def answer(path: str, wait_s: int = 0) -> int:
        with pytest.raises(urllib.error.HTTPError) as refused:
            client.get(environ, path, 40, wait_s)
        return refused.value.code

    column = "global/column.0.of.2"
    client.put(environ, "global/row.0.of.2", "..", 20)
    assert answer(column) == 404
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(answer, column, 30)
        while not server._httpd.awaited.get("global"):
            assert not waits.done()
        roster.worker_exited(1001, 137, 0.0)
        assert waits.result(timeout=20) == 404, "at once, and the next answer is another"
    assert [answer(path) for path in (column, "other/1")] == [410, 404]
    server.stop()


def test_a_lifeline_outlives_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers and lets go of the connection; the dispatcher sees when the worker's end of it is closed."""
    own, ended = driver(), threading.Event()
    lines: dict[int, socket.socket] = {}
    monkeypatch.setattr(own.dispatcher, "lifeline_opened", lines.__setitem__)
    server = RendezvousServer()
    environ = {
        client.ADDRESS: "127.0.0.1",
        client.PORT: str(server.start(replacement_of("create_rendezvous_handler")(own))),
    }
    held = client.hold(environ, "lifeline/1007", 20)
    answer = b"".join(iter(lambda: held.recv(1000), b""))
    assert answer.endswith(b"\r\n\r\n"), "there is nothing to say"
    ((number, line),) = lines.items()
    assert number == 1007
    threading.Thread(target=lambda: ended.set() if line.recv(1) == b"" else None, daemon=True).start()
    line.settimeout(None)
    assert not ended.wait(0.1)
    held.close()
    assert ended.wait(20)
    server.stop()


def test_a_worker_without_a_rank_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Horovod's form, where its core and ours look for it; the others get theirs."""
    own = driver()
    ranks = assign_ranks([Worker(1000, "a", slot=0, started_at=0, heard_at=0)])[0]
    for answer in (ranks, None):
        answers = {("a", 1000): answer}
        monkeypatch.setattr(own.dispatcher, "wait_for_ranks", lambda host, rank, answers=answers: answers[host, rank])
        own.record_ready("a", 1000)
        assert own.get_slot_info("a", 1000) == (slot_info(ranks) if answer else INVALID_SLOT_INFO)


def test_what_a_worker_runs_comes_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the job can tell whom it does not fit."""
    own, heard = driver(), list[object]()
    monkeypatch.setattr(own.dispatcher, "facts_received", lambda number, facts: heard.append((number, facts)))
    handler = replacement_of("create_rendezvous_handler")(own)
    asked = handler.__new__(handler)
    asked.client_address = ("127.0.0.1", 34567)
    asked._put_value("facts", "1003", b'{"torch": "2.15"}')
    assert heard == [(1003, {"torch": "2.15"})]


def test_ranks_find_what_others_have_written() -> None:
    """All else is Horovod's: the ranks' addresses pass through the server."""
    server = RendezvousServer()
    environ = {client.ADDRESS: "127.0.0.1"}
    environ[client.PORT] = str(server.start(replacement_of("create_rendezvous_handler")(driver())))
    client.put(environ, "global/row.0.of.2", "port ....port 4567", 20)
    client.put(environ, "global/row.1.of.2", "port 5678port ....", 20)
    assert client.get(environ, "global/column.0.of.2", 20) == "port ....port 5678"
    server.stop()


def test_a_worker_that_dies_while_it_waits_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is there to take the answer: no traceback among the lines of the job. Other errors are not hidden."""
    handler = replacement_of("create_rendezvous_handler")(driver())
    asked = handler.__new__(handler)
    asked.path = "/rank_and_size/a:1000"

    def fails(error: Exception) -> None:
        raise error

    monkeypatch.setattr(KVStoreHandler, "do_GET", lambda self: fails(BrokenPipeError()))
    asked.do_GET()
    monkeypatch.setattr(KVStoreHandler, "do_GET", lambda self: fails(ValueError("a slip")))
    with pytest.raises(ValueError, match="a slip"):
        asked.do_GET()


def test_a_worker_gets_its_ranks_through_horovods_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks with its host and number, and reads the answer as Horovod's core does."""
    own = driver()
    ranks = assign_ranks([Worker(1000, "a", slot=0, started_at=0, heard_at=0)])[0]
    answers = {("a", 1000): ranks}
    monkeypatch.setattr(own.dispatcher, "wait_for_ranks", lambda host, number: answers.get((host, number)))
    server = RendezvousServer()
    environ = {client.ADDRESS: "127.0.0.1"}
    environ[client.PORT] = str(server.start(replacement_of("create_rendezvous_handler")(own)))
    assert client.get(environ, "rank_and_size/a:1000", 20) == "0,1,0,1,0,1"
    assert client.get(environ, "rank_and_size/b:1001", 20).startswith("-1,")
    server.stop()
