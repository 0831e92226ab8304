"""`horovod.run(function)`: its ranks get the function, and send results, as pickles that the job has signed."""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from horovod.runner.http import http_client, signature
from horovod.runner.http.http_server import KVStoreServer

from tests.support.impostor import answering
from tests.support.strangers import MakesFile

LOOPBACK = "127.0.0.1"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of the store of a function that the job has put there."""
    monkeypatch.setenv(signature.KEY, signature.make_key())
    server = KVStoreServer(verbose=0)
    port = server.start_server(address=LOOPBACK)
    http_client.put_data_into_kvstore(LOOPBACK, port, "runfunc", "func", "the function")
    yield port
    server.shutdown_server()


def test_a_stranger_neither_changes_nor_reads_a_function(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the key, or with another one: a rank would run what a stranger had put there."""
    key = signature.key_of_job()
    for other in ("", signature.make_key()):
        monkeypatch.setenv(signature.KEY, other)
        with pytest.raises(RuntimeError, match="403"):
            http_client.put_data_into_kvstore(LOOPBACK, port, "runfunc", "func", "another function")
        with pytest.raises(RuntimeError, match="403"):
            http_client.read_data_from_kvstore(LOOPBACK, port, "runfunc", "func")
    monkeypatch.setenv(signature.KEY, key)
    assert http_client.read_data_from_kvstore(LOOPBACK, port, "runfunc", "func") == "the function"


@pytest.mark.parametrize("signed", ["", f"{signature.SIGNATURE}: {'0' * 64}\r\n"])
def test_an_impostors_answer_is_not_unpickled(signed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who listens where the store was, or came first, gets no code into a rank."""
    monkeypatch.setenv(signature.KEY, signature.make_key())
    body = base64.b64encode(pickle.dumps(MakesFile(tmp_path / "owned")))
    answer = f"HTTP/1.0 200 OK\r\nContent-Length: {len(body)}\r\n{signed}\r\n".encode() + body
    with answering(answer) as port, pytest.raises(RuntimeError, match="not signed by this job"):
        http_client.read_data_from_kvstore(LOOPBACK, port, "runfunc", "func")
    assert not (tmp_path / "owned").exists()


def test_who_says_nothing_holds_up_nobody(port: int) -> None:
    """As released, this store served one connection after another, each as long as it liked."""
    with socket.create_connection((LOOPBACK, port), 20) as silent:
        assert http_client.read_data_from_kvstore(LOOPBACK, port, "runfunc", "func") == "the function"
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # it is still there
            silent.recv(1)
