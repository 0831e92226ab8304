"""Requests to the store of a job are signed, and so are its answers: against Horovod's own server."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import urllib.error
from collections.abc import Iterator

import psutil
import pytest
from horovod.runner.http import http_server
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.http.signature import MOST_BYTES, Doorkeeper, Seen

from hvd_train.launch import client, signature
from tests.support.impostor import answering

LOOPBACK = "127.0.0.1"


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of a rank whose launcher serves a store and has a key."""
    key = signature.make_key()
    monkeypatch.setenv(signature.KEY, key)
    server = RendezvousServer()
    yield {client.ADDRESS: LOOPBACK, client.PORT: str(server.start(address=LOOPBACK)), signature.KEY: key}
    server.stop()


def answer(environ: dict[str, str], request: bytes) -> bytes:
    """Return what the store answers to these bytes."""
    with socket.create_connection((LOOPBACK, int(environ[client.PORT])), 20) as connection:
        connection.sendall(request)
        received = b""
        while part := connection.recv(1000):
            received += part
    return received


def signed(environ: dict[str, str], method: str = "PUT", path: str = "/scope/name", body: bytes = b"text") -> bytes:
    """Return the bytes of a request as a rank sends it."""
    lines = signature.headers(environ, method, path, body)
    head = [f"{method} {path} HTTP/1.0", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in lines.items()), ""]
    return "".join(f"{line}\r\n" for line in head).encode() + body


def test_a_rank_reads_what_another_has_written(environ: dict[str, str]) -> None:
    """With the key that both have."""
    client.put(environ, "scope/name", "some text")
    assert client.get(environ, "scope/name", 20) == "some text"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        client.get(environ, "scope/other", 20)


@pytest.mark.parametrize("key", [pytest.param("", id="no key"), pytest.param(signature.make_key(), id="another key")])
def test_a_stranger_neither_reads_nor_writes(environ: dict[str, str], key: str) -> None:
    """Without a key, or with another one: nothing is changed, and nothing is told."""
    client.put(environ, "scope/name", "secret")
    stranger = {**environ, signature.KEY: key}
    with pytest.raises(OSError, match=r"403|not signed by this job"):
        client.put(stranger, "scope/name", "other")
    with pytest.raises(OSError, match=r"403|not signed by this job"):
        client.get(stranger, "scope/name", 20)
    assert b"secret" not in answer(environ, b"GET /scope/name HTTP/1.0\r\n\r\n")
    assert client.get(environ, "scope/name", 20) == "secret"


def test_a_request_that_was_recorded_is_refused(environ: dict[str, str]) -> None:
    """It would put an old text in the place of a new one."""
    recorded = signed(environ)
    assert b" 200 " in answer(environ, recorded)
    client.put(environ, "scope/name", "newer")
    assert b" 403 " in answer(environ, recorded)
    assert client.get(environ, "scope/name", 20) == "newer"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"PUT ", b"DELETE "),
        (b"/scope/name ", b"/scope/nam2 "),
        (b"\r\n\r\ntext", b"\r\n\r\ntxet"),
        (b"Horovod-Nonce: ", b"Horovod-Nonce: 1"),
    ],
)
def test_a_request_that_was_changed_is_refused(environ: dict[str, str], old: bytes, new: bytes) -> None:
    """Another method, name, body or number needs another signature."""
    request = signed(environ)
    assert request.count(old) == 1
    assert answer(environ, request.replace(old, new)).split()[1] in (b"400", b"403")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        client.get(environ, "scope/name", 20)


def test_requests_may_overtake_one_another(environ: dict[str, str]) -> None:
    """Threads of a rank send them at the same time."""
    requests = [signed(environ, path=f"/scope/{number}") for number in range(20)]
    assert all(b" 200 " in answer(environ, request) for request in reversed(requests))


def test_numbers_are_taken_once_and_not_long_after() -> None:
    """In whatever order they come; one that is no number never is."""
    seen = Seen()
    numbers = [5, 4, 6, 0, 900, 100]
    assert all(seen.is_new(f"one-{number}") for number in numbers)
    assert not any(seen.is_new(f"one-{number}") for number in numbers)
    assert seen.is_new("another-5")
    assert seen.is_new("one-1000000")
    assert not seen.is_new("one-7")
    assert not any(seen.is_new(nonce) for nonce in ("one", "one-", "one--1", "one-x", "one-²", "one-" + "9" * 30))


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"PUT /a/b HTTP/1.0\r\nContent-Length: x\r\n\r\n", b"\0" * 70_000],
)
def test_garbage_prints_nothing(environ: dict[str, str], garbage: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever looks at ports finds this one, too; the user's terminal is not the place to tell of it at length."""
    with socket.create_connection((LOOPBACK, int(environ[client.PORT])), 20) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(10_000):
            pass
    client.put(environ, "scope/name", "still here")
    assert "Traceback" not in capfd.readouterr().err


def test_a_body_of_a_stranger_is_not_read(environ: dict[str, str]) -> None:
    """However long it says that it is: memory is for ranks of the job."""
    before = psutil.Process().memory_info().rss
    for _ in range(20):
        refused = answer(environ, b"PUT /scope/name HTTP/1.0\r\nContent-Length: 400000000\r\n\r\n" + b"x" * 100_000)
        assert refused == b"" or b" 403 " in refused
    assert psutil.Process().memory_info().rss - before < 20e6


def test_the_body_of_a_rank_has_a_limit(environ: dict[str, str]) -> None:
    """A length is said before the body; it is refused then."""
    connection = http.client.HTTPConnection(LOOPBACK, int(environ[client.PORT]), timeout=20)
    lines = signature.headers(environ, "PUT", "/scope/name")
    connection.request("PUT", "/scope/name", headers={**lines, "Content-Length": str(MOST_BYTES + 1)})
    assert connection.getresponse().status == 413


def test_strangers_that_stay_are_sent_away(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of connections that say nothing only so many stay open, and a rank is answered all the same."""
    monkeypatch.setattr(http_server, "MOST_STRANGERS", 10)
    strangers = [socket.create_connection((LOOPBACK, int(environ[client.PORT])), 20) for _ in range(15)]
    try:
        client.put(environ, "scope/name", "some text")
        assert [stranger.recv(1) for stranger in strangers[:5]] == [b""] * 5
    finally:
        for stranger in strangers:
            stranger.close()


def test_strangers_leave_the_launcher_files_to_open(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection is one, and so is each pipe to a rank: where few may be open, fewer strangers stay."""
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (20, 4096))
    strangers = [socket.create_connection((LOOPBACK, int(environ[client.PORT])), 2) for _ in range(12)]
    try:
        client.put(environ, "scope/name", "some text")
        assert [stranger.recv(1) for stranger in strangers[:2]] == [b""] * 2
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_request_that_never_ends_is_cut_off(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep it open."""
    monkeypatch.setattr(http_server, "WHOLE_REQUEST_TIMEOUT", 0.5)
    stop = threading.Event()
    with socket.create_connection((LOOPBACK, int(environ[client.PORT])), 20) as connection:

        def trickle() -> None:
            while not stop.wait(0.05):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            pass
        finally:
            stop.set()
            thread.join()


def test_an_impostor_is_not_believed(environ: dict[str, str]) -> None:
    """Who listens at the port of a store that is gone, or came first, does not have the key."""
    forged = f"{signature.SIGNATURE}: {'0' * 64}\r\n"
    with (
        answering(f"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n{forged}\r\nstop".encode()) as port,
        pytest.raises(ConnectionError, match="not signed by this job"),
    ):
        client.get({**environ, client.PORT: port}, "heartbeat/7", 20)


def test_the_answer_to_another_request_is_not_believed(environ: dict[str, str]) -> None:
    """One that was recorded says what was true then."""
    client.put(environ, "scope/name", "old")
    recorded = answer(environ, signed(environ, "GET", body=b""))
    assert recorded.endswith(b"old")
    with answering(recorded) as port, pytest.raises(ConnectionError, match="not signed by this job"):
        client.get({**environ, client.PORT: port}, "scope/name", 20)


def test_a_fork_counts_for_itself() -> None:
    """Two processes with one name and one number would be taken for one that repeats itself."""
    here = signature._process(os.getpid())
    assert here == signature._process(os.getpid()) != signature._process(os.getpid() + 1)


def test_the_user_is_told_of_strangers_once(capfd: pytest.CaptureFixture[str]) -> None:
    """One line with the address and the reason."""
    doorkeeper = Doorkeeper()
    doorkeeper.refused("10.0.0.7", "not signed with its key")
    doorkeeper.refused("10.0.0.8", "not signed with its key")
    told = capfd.readouterr().err
    assert told.startswith("horovod: refused a request from 10.0.0.7 (not signed with its key)")
    assert told.count("\n") == 1
