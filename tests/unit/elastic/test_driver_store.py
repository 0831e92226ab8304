"""Where the driver's server listens, and what it takes."""

from __future__ import annotations

import base64
import pickle
import socket
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvd_train.elastic.driver import Driver, Store
from hvd_train.launch import client, signature
from tests.support.drivers import driver, replacement_of
from tests.support.malicious import Malicious


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, dict[str, str]]]:
    """The server of a driver, and the environment of a worker on the same host."""
    monkeypatch.setattr(Driver, "listen_at", Driver.listen_at)
    key = signature.make_key()
    monkeypatch.setenv(signature.KEY, key)
    server = Store()
    port = server.start(replacement_of("create_rendezvous_handler")(driver()))
    yield server, {client.ADDRESS: "127.0.0.1", client.PORT: str(port), signature.KEY: key}
    server.stop()


def addresses_of(port: str) -> set[str]:
    """Return the addresses at which this process listens on a port."""
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == int(port)}


def test_a_job_on_one_host_listens_on_its_loopback(store: tuple[Store, dict[str, str]]) -> None:
    """Until a worker elsewhere needs another address; that one is opened alone, and once."""
    _, environ = store
    assert addresses_of(environ[client.PORT]) == {"127.0.0.1"}
    for _ in range(2):
        assert Driver.listen_at(["127.0.0.2", "127.0.0.1"]) == ["127.0.0.2", "127.0.0.1"]
    assert addresses_of(environ[client.PORT]) == {"127.0.0.1", "127.0.0.2"}
    client.put(environ, "global/1", "where rank 1 is", 20)
    assert client.get({**environ, client.ADDRESS: "127.0.0.2"}, "global/1", 20) == "where rank 1 is"


def test_an_address_at_which_nobody_can_listen_is_not_told(store: tuple[Store, dict[str, str]]) -> None:
    """The port may be another program's there; a worker is told the others."""
    _, environ = store
    with socket.create_server(("127.0.0.3", int(environ[client.PORT]))):
        assert Driver.listen_at(["127.0.0.3", "127.0.0.4"]) == ["127.0.0.4"]


def test_what_the_driver_does_not_know_is_not_taken(store: tuple[Store, dict[str, str]]) -> None:
    """Horovod's driver unpickles what comes under `worker_addresses`, be it from a rank of the job."""
    _, environ = store
    code = base64.b64encode(pickle.dumps(Malicious())).decode()
    for name in ("worker_addresses/localhost:0", "runfunc/func", "heartbeat/1000"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            client.put(environ, name, code, 20)
    assert not Path("owned").exists()
