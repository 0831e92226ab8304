"""The client of the launcher's key-value server, against Horovod's own server."""

from __future__ import annotations

import socket
import urllib.error
from collections.abc import Iterator

import pytest
from horovod.runner.http.http_server import RendezvousServer

from hvd_train.launch import client
from tests.support.impostor import answering


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """The environment of a rank whose launcher serves a store."""
    server = RendezvousServer()
    yield {client.ADDRESS: "127.0.0.1", client.PORT: str(server.start())}
    server.stop()


def test_what_is_put_can_be_got(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a proxy, whatever the environment says; a name that nobody has written to is refused."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    client.put(environ, "scope/name", "some text")
    assert client.get(environ, "scope/name", 20) == "some text"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        client.get(environ, "scope/other", 20)


def test_a_server_that_is_gone_is_an_oserror() -> None:
    """As for all who look for a file or a host that is not there."""
    with pytest.raises(OSError, match="refused"):
        client.get({client.ADDRESS: "127.0.0.1", client.PORT: "1"}, "scope/name", 20)


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\ncut"])
def test_a_garbled_answer_is_an_oserror(answer: bytes) -> None:
    """Whoever reckons with a server that does not answer has reckoned with this."""
    with (
        answering(answer) as port,
        pytest.raises(OSError, match=f"the answer from 127.0.0.1:{port} is garbled"),
    ):
        client.get({client.ADDRESS: "127.0.0.1", client.PORT: port}, "scope/name", 20)


def test_a_connection_is_held_as_long_as_one_wants() -> None:
    """The server sees the request, and the end of the connection when its holder lets go of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = client.hold({client.ADDRESS: "127.0.0.1", client.PORT: str(server.getsockname()[1])}, "lifeline/7", 20)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1000) == b"GET /lifeline/7 HTTP/1.0\r\n\r\n"
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
            connection.settimeout(20)
            held.close()
            assert connection.recv(1) == b""
