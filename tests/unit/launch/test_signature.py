"""Requests to the store of a job and its answers are signed; the server is Horovod's own."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch
from uuid import uuid4

import pytest
from horovod.runner.http import http_server, signature
from horovod.runner.http.http_server import RendezvousServer

from hvd_train.launch import client
from tests.support.faults import answering

LOOPBACK = "127.0.0.1"
Environ = dict[str, str]


@pytest.fixture(scope="module")
def environ() -> Iterator[Environ]:
    key = signature.make_key()
    server = RendezvousServer()
    with patch.dict(os.environ, {client.KEY: key}):
        port = server.start(address=LOOPBACK)
        yield {client.ADDRESS: LOOPBACK, client.PORT: str(port), client.KEY: key}
    server.stop()


@pytest.fixture
def name() -> str:
    return f"scope/{uuid4().hex}"


def connect(environ: Environ) -> socket.socket:
    return socket.create_connection((LOOPBACK, int(environ[client.PORT])), 60)


def answer(environ: Environ, request: bytes) -> bytes:
    with connect(environ) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1000), b""))


def signed(environ: Environ, name: str, method: str = "PUT", body: bytes = b"text") -> bytes:
    headers = signature.headers(environ[client.KEY], method, f"/{name}", body)
    head = [
        f"{method} /{name} HTTP/1.0",
        f"Content-Length: {len(body)}",
        *map(": ".join, headers.items()),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def test_ranks_share_texts(environ: Environ, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    client.put(environ, name, "some text")
    assert client.get(environ, name, 60) == "some text"
    assert client.get(environ, f"{name}x", 60) == ""


def test_a_server_that_is_gone_is_an_oserror() -> None:
    """So is a garbled answer."""
    garbled = b"SSH-2.0-OpenSSH_9.2\r\n"
    with pytest.raises(OSError, match="refused"):
        client.get({client.ADDRESS: LOOPBACK, client.PORT: "1"}, "scope/name", 60)
    with (
        answering(garbled) as port,
        pytest.raises(OSError, match=f"the answer from 127.0.0.1:{port} is garbled"),
    ):
        client.get({client.ADDRESS: LOOPBACK, client.PORT: port}, "scope/name", 60)


def test_an_unauthenticated_client_neither_reads_nor_writes(environ: Environ, name: str) -> None:
    client.put(environ, name, "secret")
    for key in ("", signature.make_key()):
        with (
            patch.dict(os.environ, {client.KEY: key}),
            pytest.raises(OSError, match=r"403|not signed by this job"),
        ):
            client.put(environ, name, "other")
    assert b"secret" not in answer(environ, f"GET /{name} HTTP/1.0\r\n\r\n".encode())
    assert client.get(environ, name, 60) == "secret"


def test_a_recorded_request_is_refused(environ: Environ, name: str) -> None:
    recorded = signed(environ, name)
    assert b" 200 " in answer(environ, recorded)
    client.put(environ, name, "newer")
    assert b" 403 " in answer(environ, recorded)
    assert client.get(environ, name, 60) == "newer"


def test_a_changed_request_is_refused(environ: Environ, name: str) -> None:
    changes = {
        b"PUT ": b"DELETE ",
        b"/scope/": b"/scop2/",
        b"\r\n\r\ntext": b"\r\n\r\ntxet",
        b"-Nonce: ": b"-Nonce: 1",
    }
    for old, new in changes.items():
        request = signed(environ, name)
        assert request.count(old) == 1
        assert answer(environ, request.replace(old, new)).split()[1] in (b"400", b"403")
    assert client.get(environ, name, 60) == ""


def test_silent_connections_leave_room_for_ranks(
    environ: Environ, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_STRANGERS", 10)
    with ExitStack() as held:
        silent = [held.enter_context(connect(environ)) for _ in range(15)]
        client.put(environ, name, "some text")
        assert [connection.recv(1) for connection in silent[:5]] == [b""] * 5


def test_an_answer_without_the_jobs_signature_is_refused(environ: Environ, name: str) -> None:
    client.put(environ, name, "old")
    recorded = answer(environ, signed(environ, name, "GET", b""))
    assert recorded.endswith(b"old")
    forged = (
        f"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n{signature.SIGNATURE}: {'0' * 64}\r\n\r\nstop"
    ).encode()
    for planted in (forged, recorded):
        with (
            answering(planted) as port,
            pytest.raises(ConnectionError, match="not signed by this job"),
        ):
            client.get({**environ, client.PORT: port}, name, 60)
