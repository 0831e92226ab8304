"""What the driver starts, and what its server answers."""

import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from horovod.runner.util import network

from hvd_train.elastic.dispatcher import Dispatcher, assign_ranks
from hvd_train.elastic.driver import SSH_OPTIONS, DriverServer, found_hosts, handler, run_command
from hvd_train.elastic.roster import Worker
from hvd_train.launch import client
from tests.support.launching import write_program


def test_hosts_are_read_from_a_command() -> None:
    assert found_hosts("printf 'a:2\\nb # old\\n\\nc:0\\nd slots=3\\n'") == {"a": 2, "b": 1, "d": 3}


def test_ranks_have_horovods_form() -> None:
    # rank,size,local_rank,local_size,cross_rank,cross_size
    workers = [
        Worker(1000 + n, host, slot=n, started_at=0, last_heartbeat=0)
        for n, host in enumerate("abacba")
    ]
    answers = [ranks.to_response_string() for ranks in assign_ranks(workers)]
    assert answers == [
        "0,6,0,3,0,3",
        "1,6,0,2,1,3",
        "2,6,1,3,0,2",
        "3,6,0,1,2,3",
        "4,6,1,2,1,2",
        "5,6,2,3,0,1",
    ]


def test_ssh_runs_the_worker_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process that sshd starts becomes the worker, so ssh ends with it; no
    variable is on a command line.
    """
    write_program(
        tmp_path,
        "ssh",
        f'[ "$1" = -G ] && exit; echo "$@" > {tmp_path}/line; for last; do :; done; eval "$last"',
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(network, "resolve_host_address", lambda name: None)
    work = (
        "import os, sys; print('out', os.environ['HOROVOD_RANK'], flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    code = run_command(
        "h2", [sys.executable, "-c", work], {"HOROVOD_RANK": "77"}, [threading.Event()]
    )
    assert (code, capfd.readouterr().out) == (137, "out 77\n")
    line = (tmp_path / "line").read_text()
    assert line.startswith(SSH_OPTIONS)
    assert "77" not in line


def test_the_server_listens_on_the_loopback_until_another_host_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(client.KEY, "the key of this job")
    server = DriverServer()
    port = server.start(handler(Mock(Dispatcher), server))

    def listens_at():
        return {
            connection.laddr.ip
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }

    try:
        assert listens_at() == {"127.0.0.1"}
        for _ in range(2):
            server.listen_at("127.0.0.2")
        assert listens_at() == {"127.0.0.1", "127.0.0.2"}
        environ = {client.ADDRESS: "127.0.0.1", client.PORT: str(port)}
        assert client.get(environ, "elsewhere/1000", 60) == "127.0.0.2"
    finally:
        server.stop()
