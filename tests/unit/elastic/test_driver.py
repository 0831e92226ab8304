"""What the driver replaces in Horovod, and what its server answers."""

import base64
import pickle
import shlex
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from horovod.runner.util import worker_environment

from hvd_train.elastic.driver import SSH_OPTIONS, Driver, DriverServer, HostCommand
from hvd_train.elastic.worker import Worker, assign_ranks
from hvd_train.errors import UsageError
from hvd_train.launch import client
from hvd_train.launch.launcher import WORKER
from tests.support.faults import Malicious
from tests.support.jobs import driver, replacement_of


def test_hosts_are_read_from_a_command() -> None:
    found = HostCommand("printf 'a:2\\nb # old\\n\\nc:0\\nd slots=3\\n'", 4)
    assert found.find_available_hosts_and_slots() == {"a": 2, "b": 4, "d": 3}


def test_a_bad_list_is_one_line() -> None:
    for command, message in (
        ("echo a:two", "line 1: 'a:two' is not of the form"),
        ("echo first >&2; echo 'no such file' >&2; exit 1", "^no such file$"),
    ):
        with pytest.raises(UsageError, match=message):
            HostCommand(command, 1).find_available_hosts_and_slots()


def test_ranks_have_horovods_form() -> None:
    # rank,size,local_rank,local_size,cross_rank,cross_size
    workers = [Worker(1000 + n, host, slot=n, started_at=0, last_heartbeat=0) for n, host in enumerate("abacba")]
    answers = [ranks.to_response_string() for ranks in assign_ranks(workers)]
    assert answers == ["0,6,0,3,0,3", "1,6,0,2,1,3", "2,6,1,3,0,2", "3,6,0,1,2,3", "4,6,1,2,1,2", "5,6,2,3,0,1"]


def test_ssh_runs_the_worker_itself() -> None:
    """The process that sshd starts becomes the worker, so ssh ends with it."""
    program = "import os, sys; print('out', flush=True); print('err', file=sys.stderr); os.kill(os.getpid(), 9)"
    command = f"exec env A=1 {shlex.join([sys.executable, '-c', program])}"
    script, variables = worker_environment.on_other_host(command, {"HOROVOD_RANK": "1"}, "/")
    line = replacement_of("get_remote_command")(shlex.quote(script), "h2", 2222)
    assert line.startswith(f"ssh {SSH_OPTIONS} -o ")
    remote = shlex.split(line)[-1]  # for the login shell on the other host
    done = subprocess.run(["sh", "-c", remote], input=variables.decode(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-9, "out\n", "err\n")


@pytest.fixture
def own() -> Driver:
    made = driver()
    roster = made.dispatcher._roster
    roster.hosts_found({"a": 2})
    roster.commands(0.0)
    for number in (1000, 1001):
        roster.rank_requested(number, 0.0)
    roster.commands(0.0)
    return made


@pytest.fixture
def environ(own: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    monkeypatch.setattr(Driver, "listen_at", Driver.listen_at)
    monkeypatch.setenv(client.KEY, "the key of this job")
    server = DriverServer()
    port = server.start(replacement_of("create_rendezvous_handler")(own))
    yield {client.ADDRESS: "127.0.0.1", client.PORT: str(port), client.KEY: "the key of this job", WORKER: "1007"}
    server.stop()


def test_the_server_keeps_addresses_of_ranks(environ: dict[str, str]) -> None:
    client.put(environ, "global/0", "on port 4567", 60)
    client.put(environ, "cross_0/0", "on port 6789", 60)
    assert [client.get(environ, path, 60) for path in ("global/0", "cross_0/0")] == ["on port 4567", "on port 6789"]


def test_the_server_listens_on_the_loopback_until_another_host_needs_it(environ: dict[str, str]) -> None:
    def listens_at() -> set[str]:
        connections = psutil.Process().net_connections("tcp")
        port = int(environ[client.PORT])
        return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}

    assert listens_at() == {"127.0.0.1"}
    assert Driver.listen_at(["127.0.0.2", "127.0.0.1"]) == ["127.0.0.2", "127.0.0.1"]
    assert listens_at() == {"127.0.0.1", "127.0.0.2"}
    with socket.create_server(("127.0.0.3", int(environ[client.PORT]))):
        assert Driver.listen_at(["127.0.0.3", "127.0.0.4"]) == ["127.0.0.4"]


def test_the_server_refuses_unknown_scopes(environ: dict[str, str]) -> None:
    """Horovod's driver unpickles what arrives under `worker_addresses` (CVE-2024-10190)."""
    code = base64.b64encode(pickle.dumps(Malicious())).decode()
    for name in ("worker_addresses/localhost:0", "runfunc/func", "heartbeat/1000"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            client.put(environ, name, code, 60)
    assert not Path("owned").exists()
