"""The store of a job and its client: requests and answers are signed, against Horovod's own server."""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.error
from collections.abc import Iterator
from uuid import uuid4

import psutil
import pytest
from horovod.runner.http import http_server
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.http.signature import MOST_BYTES, Doorkeeper

from hvd_train.launch import client, signature
from tests.support.impostor import answering

LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    """The environment of a rank whose launcher serves a store and has a key."""
    key, server = signature.make_key(), RendezvousServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(signature.KEY, key)
        port = server.start(address=LOOPBACK)
    yield {client.ADDRESS: LOOPBACK, client.PORT: str(port), signature.KEY: key}
    server.stop()


@pytest.fixture
def name() -> str:
    """The name of a text that no other test writes."""
    return f"scope/{uuid4().hex}"


def connect(environ: dict[str, str]) -> socket.socket:
    return socket.create_connection((LOOPBACK, int(environ[client.PORT])), 60)


def answer(environ: dict[str, str], request: bytes) -> bytes:
    """Return what the store answers to these bytes."""
    with connect(environ) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1000), b""))


def signed(environ: dict[str, str], name: str, method: str = "PUT", body: bytes = b"text") -> bytes:
    """Return the bytes of a request as a rank sends it."""
    lines = {"Content-Length": str(len(body)), **signature.headers(environ, method, f"/{name}", body)}
    head = [f"{method} /{name} HTTP/1.0", *(f"{key}: {value}" for key, value in lines.items()), ""]
    return "".join(f"{line}\r\n" for line in head).encode() + body


def test_a_rank_reads_what_another_has_written(
    environ: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a proxy, whatever the environment says; a name that no rank has written is an error."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    client.put(environ, name, "some text")
    assert client.get(environ, name, 60) == "some text"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        client.get(environ, f"{name}x", 60)


def test_a_server_that_is_gone_is_an_oserror() -> None:
    """So is a garbled answer: callers expect a file or a host that is not there."""
    with pytest.raises(OSError, match="refused"):
        client.get({client.ADDRESS: LOOPBACK, client.PORT: "1"}, "scope/name", 60)
    for garbled in (b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\ncut"):
        with (
            answering(garbled) as port,
            pytest.raises(OSError, match=f"the answer from 127.0.0.1:{port} is garbled"),
        ):
            client.get({client.ADDRESS: LOOPBACK, client.PORT: port}, "scope/name", 60)


@pytest.mark.parametrize("key", [pytest.param("", id="no key"), pytest.param(signature.make_key(), id="another key")])
def test_an_unauthenticated_client_neither_reads_nor_writes(environ: dict[str, str], name: str, key: str) -> None:
    """Nothing is changed and nothing is revealed."""
    client.put(environ, name, "secret")
    other = {**environ, signature.KEY: key}
    with pytest.raises(OSError, match=r"403|not signed by this job"):
        client.put(other, name, "other")
    with pytest.raises(OSError, match=r"403|not signed by this job"):
        client.get(other, name, 60)
    assert b"secret" not in answer(environ, f"GET /{name} HTTP/1.0\r\n\r\n".encode())
    assert client.get(environ, name, 60) == "secret"


def test_a_recorded_request_is_refused(environ: dict[str, str], name: str) -> None:
    """It would replace a new text by an old one."""
    recorded = signed(environ, name)
    assert b" 200 " in answer(environ, recorded)
    client.put(environ, name, "newer")
    assert b" 403 " in answer(environ, recorded)
    assert client.get(environ, name, 60) == "newer"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"PUT ", b"DELETE "),
        (b"/scope/", b"/scop2/"),
        (b"\r\n\r\ntext", b"\r\n\r\ntxet"),
        (b"Horovod-Nonce: ", b"Horovod-Nonce: 1"),
    ],
)
def test_a_changed_request_is_refused(environ: dict[str, str], name: str, old: bytes, new: bytes) -> None:
    """Another method, name, body or nonce needs another signature."""
    request = signed(environ, name)
    assert request.count(old) == 1
    assert answer(environ, request.replace(old, new)).split()[1] in (b"400", b"403")
    for path in (name, name.replace("scope", "scop2")):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            client.get(environ, path, 60)


def test_garbage_prints_no_traceback(environ: dict[str, str], name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Port scanners find the store too, and it goes on."""
    no_length = b"PUT /a/b HTTP/1.0\r\nContent-Length: x\r\n\r\n"
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", no_length, b"\0" * 70_000):
        with connect(environ) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(10_000):
                pass
    client.put(environ, name, "still here")
    assert "Traceback" not in capfd.readouterr().err


def test_the_body_of_an_unauthenticated_client_is_not_read(environ: dict[str, str], name: str) -> None:
    """Whatever length it claims; the body of a rank has a limit, which is checked before the body."""
    before = psutil.Process().memory_info().rss
    head = f"PUT /{name} HTTP/1.0\r\nContent-Length: 400000000\r\n\r\n".encode()
    for _ in range(20):
        refused = answer(environ, head + b"x" * 100_000)
        assert refused == b"" or b" 403 " in refused
    assert psutil.Process().memory_info().rss - before < 20e6
    connection = http.client.HTTPConnection(LOOPBACK, int(environ[client.PORT]), timeout=60)
    lines = signature.headers(environ, "PUT", f"/{name}")
    connection.request("PUT", f"/{name}", headers={**lines, "Content-Length": str(MOST_BYTES + 1)})
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("limit", ["connections", "open files"])
def test_silent_connections_leave_room_for_ranks(
    limit: str, environ: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is closed when there are too many, or when they would take half of the files that may be open."""
    if limit == "connections":
        monkeypatch.setattr(http_server, "MOST_STRANGERS", 10)
    else:
        monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (20, 4096))
    silent = [connect(environ) for _ in range(15)]
    try:
        client.put(environ, name, "some text")
        assert [connection.recv(1) for connection in silent[:5]] == [b""] * 5
    finally:
        for connection in silent:
            connection.close()


def test_a_request_that_never_ends_is_cut_off(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep it open."""
    monkeypatch.setattr(http_server, "WHOLE_REQUEST_TIMEOUT", 0.5)
    stop = threading.Event()
    with connect(environ) as connection:

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


def test_an_answer_without_the_jobs_signature_is_not_believed(environ: dict[str, str], name: str) -> None:
    """Neither that of an impostor at the store's port, nor a recorded answer to another request."""
    client.put(environ, name, "old")
    recorded = answer(environ, signed(environ, name, "GET", b""))
    assert recorded.endswith(b"old")
    forged = f"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n{signature.SIGNATURE}: {'0' * 64}\r\n\r\nstop".encode()
    for planted in (forged, recorded):
        with answering(planted) as port, pytest.raises(ConnectionError, match="not signed by this job"):
            client.get({**environ, client.PORT: port}, name, 60)


def test_the_user_is_told_of_unauthenticated_clients_once(capfd: pytest.CaptureFixture[str]) -> None:
    """In one line with the address and the reason."""
    doorkeeper = Doorkeeper()
    doorkeeper.refused("10.0.0.7", "not signed with its key")
    doorkeeper.refused("10.0.0.8", "not signed with its key")
    told = capfd.readouterr().err
    assert told.startswith("horovod: refused a request from 10.0.0.7 (not signed with its key)")
    assert told.count("\n") == 1
