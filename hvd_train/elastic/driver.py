"""Run the driver of an elastic job: `python -m hvd_train.elastic.driver -np N
--host-discovery-script SCRIPT COMMAND`.

Horovod's own driver bars a host after one crash, lets members wait while newcomers import, never
notices a silent worker, and takes the first exit code 0 for the end of the job. `dispatcher` and
`roster` take its place; Horovod's rendezvous server, its ssh and its way to run a process stay.
"""

import argparse
import json
import os
import resource
import shlex
import sys
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence

from horovod.runner.common.util import outcome, safe_shell_exec
from horovod.runner.gloo_run import register_shutdown_event
from horovod.runner.http import signature
from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer
from horovod.runner.util import network, worker_environment
from horovod.runner.util.remote import get_remote_command

from hvd_train.console import outlive, say
from hvd_train.elastic import roster
from hvd_train.elastic.dispatcher import Dispatcher
from hvd_train.elastic.roster import Roster, Worker
from hvd_train.errors import UsageError, from_one, whole_number
from hvd_train.launch import client, hosts, interfaces
from hvd_train.launch.exit_report import ExitReport
from hvd_train.launch.workers import INTERFACES

# The environment of a worker, unless the user sets something else.
DEFAULTS = {
    # to connect: all ranks are ready, and a dead one costs all this time
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "6",
    # for a peer that is silent during an operation
    "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": "5",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",  # for a rank that does not take part in an operation
    "PYTHONUNBUFFERED": "1",
}
# No prompt for a password. Before a worker's first heartbeat, ssh ends a minute after its host is
# gone.
SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=20"

_NO_RANK = b"-1,-1,-1,-1,-1,-1"  # in Horovod's form: leave


class DriverServer(RendezvousServer):  # type: ignore[misc]  # Horovod has no types
    """Horovod's rendezvous server, which listens only at the addresses that workers
    need: at first the loopback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._listens_at = {client.LOOPBACK}
        # the newest address for workers on other hosts; empty before there is one
        self.elsewhere = ""

    def start(self, handler: type[RendezvousHandler]) -> int:
        """Begin to answer, and return the port."""
        return int(super().start(handler, client.LOOPBACK))

    def listen_at(self, address: str) -> None:
        """Listen also at this address of this host. Raises OSError if the port is in use there."""
        with self._lock:
            if address not in self._listens_at:
                self.also_listen_at(address)
                self._listens_at.add(address)
                self.elsewhere = address


def handler(dispatcher: Dispatcher, server: DriverServer) -> type[RendezvousHandler]:
    """Return Horovod's handler of requests, with the requests of our workers."""

    class Handler(RendezvousHandler):  # type: ignore[misc]  # Horovod has no types
        def _get_value(self, scope: str, key: str) -> bytes | None:
            if scope == "problem":
                return dispatcher.problem_with(json.loads(self.body)).encode()
            if scope == "elsewhere":
                return server.elsewhere.encode()
            if scope in ("heartbeat", "leaving"):
                number, _, known = key.partition("-")
                if scope == "leaving":
                    dispatcher.signal_received(int(number))
                self.connection.settimeout(roster.SILENT_S)
                return dispatcher.heartbeats(int(number), known, self.connection).encode()
            if scope == "rank_and_size":
                ranks = dispatcher.wait_for_ranks(int(key.partition(":")[2]))
                return ranks.to_response_string().encode() if ranks else _NO_RANK
            value: bytes | None = super()._get_value(scope, key)
            return value

        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            if scope == "exit_report":
                report = json.loads(value)
                dispatcher.exit_report_received(int(key), report and ExitReport(**report))
            elif scope == "left":
                dispatcher.world_left(int(key), *json.loads(value))
            elif scope == "run_dir":
                dispatcher.run_dir = value.decode()
            else:
                super()._put_value(scope, key, value)

    return Handler


def run_command(
    host: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    events: Sequence[threading.Event],
) -> int:
    """Run a command on a host until it ends or an event is set; return its exit code."""
    line = f"exec {shlex.join(command)}"
    environment = {**os.environ, **variables}
    stdin = None
    if network.resolve_host_address(host) not in network.get_local_host_addresses():
        passed = worker_environment.for_other_hosts(environment)
        script, stdin = worker_environment.on_other_host(line, passed, os.getcwd())
        line = get_remote_command(shlex.quote(script), host).replace(
            "ssh ", f"ssh {SSH_OPTIONS} ", 1
        )
    code: int = safe_shell_exec.execute(line, env=environment, stdin=stdin, index=0, events=events)
    return code


def found_hosts(command: str) -> dict[str, int]:
    """Return the slots of the hosts that a shell command prints.

    Raises UsageError as `hosts.printed_by`.
    """
    return {
        host.name: host.slots
        for host in hosts.printed_by(command, f"the output of {command}")
        if host.slots
    }


def run_job(options: Namespace) -> None:
    """Run the job. Raises: UsageError: before it starts; JobFailedError: if it is not done."""
    text = os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or "600"
    if not (patience_s := whole_number(text)):
        raise UsageError(f"HOROVOD_ELASTIC_TIMEOUT is a number of seconds from 1, not {text!r}")
    # raises JobFailedError if HVD_TRAIN_ENV is wrong
    worker_environment.for_other_hosts(os.environ)
    server = DriverServer()
    interrupted = register_shutdown_event()
    named = os.environ.get(interfaces.GLOO_INTERFACE, "")

    def run_worker(worker: Worker, variables: Mapping[str, str], end: threading.Event) -> int:
        address = interfaces.address_for(worker.host, named.split(","))
        server.listen_at(address)
        of_driver = {client.ADDRESS: address, client.PORT: str(port), INTERFACES: named}
        return run_command(
            worker.host, options.command, {**variables, **of_driver}, [interrupted, end]
        )

    start_workers = min(max(options.np, options.min_np), options.max_np)
    workers = Roster(start_workers, options.min_np, options.max_np, patience_s=float(patience_s))
    dispatcher = Dispatcher(
        workers,
        lambda: found_hosts(options.host_discovery_script),
        server.init,
        run_worker,
        interrupted,
    )
    port = server.start(handler(dispatcher, server))
    finish = dispatcher.run()
    server.stop()
    if interrupted.is_set():
        raise outcome.interrupted(interrupted.signum)
    if finish.exit_code:
        raise outcome.JobFailedError(finish.reason, finish.exit_code)


def main() -> None:
    """Run the command line; end with the exit code of the job."""
    # else the threads that forward output would end with their console, and workers block
    outlive()
    parser = argparse.ArgumentParser(prog="python -m hvd_train.elastic.driver", description=__doc__)
    parser.add_argument(
        "-np", type=from_one, required=True, help="workers for which the first world waits"
    )
    parser.add_argument("--min-np", type=from_one, default=1)
    parser.add_argument("--max-np", type=from_one, default=sys.maxsize)
    parser.add_argument(
        "--host-discovery-script", required=True, help="a command that prints lines of a host file"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    # each worker has some pipes and a connection for heartbeats
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ.pop(client.ADDRESS, None)  # it may be an outer job's
    os.environ[client.KEY] = signature.make_key()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        run_job(options)
    except (UsageError, outcome.JobFailedError) as error:
        sys.stdout.flush()
        say(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
