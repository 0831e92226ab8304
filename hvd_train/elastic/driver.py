"""Run Horovod's launcher with our driver: `python -m hvd_train.elastic.driver` takes the options of horovodrun.

Horovod's own driver bars a host after one crash, lets members wait while newcomers import, never notices a silent
worker, and takes the first exit code 0 for the end of the job. `dispatcher` and `roster` take its place; Horovod's
command line, ssh and rendezvous server stay. REPLACEMENTS lists each part that is replaced while this process runs.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from horovod.runner import gloo_run, launch
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO
from horovod.runner.common.util.outcome import JobFailedError
from horovod.runner.driver import driver_service
from horovod.runner.elastic import discovery
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.util import network
from horovod.runner.util.remote import get_remote_command

from hvd_train.console import outlive
from hvd_train.elastic.dispatcher import Dispatcher, RunWorker
from hvd_train.elastic.roster import Roster
from hvd_train.elastic.worker import WRONG_SETTINGS, RankAssignment
from hvd_train.errors import whole_number
from hvd_train.launch import client, hosts
from hvd_train.launch.exit_report import ExitReport
from hvd_train.launch.launcher import DRIVER_ADDRESSES, INTERFACES

# The environment of a worker, unless the user sets something else.
DEFAULTS = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "6",  # to connect: all ranks are ready, and a dead one costs all this time
    "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": "5",  # for a peer that is silent during an operation
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",  # for a rank that does not take part in an operation
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "180",
    "HOROVOD_LOG_LEVEL": "fatal",  # we report lost connections ourselves
}
# No prompt for a password. Before a worker's first heartbeat, ssh ends a minute after its host is gone.
SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=20"

# What workers may write: addresses of ranks, and our own.
_WRITABLE = ("/global", "/local_", "/cross_", "/facts/", "/exit_report/", "/connect_error/")


class HostCommand:
    """A shell command that prints the lines of a host file; a host without a number has `slots` slots."""

    def __init__(self, command: str, slots: int | None) -> None:
        self._command, self._slots = command, slots or 1

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots by host. Raises UsageError as `hosts.printed_by`."""
        listed = hosts.printed_by(self._command, f"the output of {self._command}", self._slots)
        return {host.name: host.slots for host in listed if host.slots}


class DriverServer(RendezvousServer):  # type: ignore[misc]  # Horovod has no types
    """Horovod's rendezvous server, which listens only at the addresses that workers need: at first the loopback."""

    def __init__(self, verbose: int = 0) -> None:
        super().__init__(verbose)
        self._lock = threading.Lock()
        self._listens_at = {client.LOOPBACK}
        Driver.listen_at = self.listen_at

    def start(self, handler_cls: Any) -> int:
        """Begin to answer, and return the port."""
        return int(super().start(handler_cls, client.LOOPBACK))

    def listen_at(self, wanted: Sequence[str]) -> list[str]:
        """Listen also at these addresses of this host; return the ones that can be reached now."""
        with self._lock:
            for address in wanted:
                if address not in self._listens_at:
                    with suppress(OSError):  # the port may be in use there
                        self.also_listen_at(address)
                        self._listens_at.add(address)
            return [address for address in wanted if address in self._listens_at]


class Driver:
    """Passes the launcher's calls of Horovod's ElasticDriver on to our dispatcher."""

    interrupted: ClassVar[threading.Event] = threading.Event()  # Horovod's, set by a signal to the launcher
    interfaces: ClassVar[Sequence[str]] = ()  # the network interfaces that the user has named
    listen_at: ClassVar[Callable[[Sequence[str]], list[str]]] = list  # `DriverServer.listen_at`, once there is a server

    def __init__(
        self,
        rendezvous: Any,
        discovery: Any,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: int | None = None,
        **_unused: Any,
    ) -> None:
        """Take Horovod's arguments. Raises JobFailedError if `HOROVOD_ELASTIC_TIMEOUT` is no number of seconds."""
        text = os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or "600"
        patience_s = timeout or whole_number(text)
        if not patience_s:
            raise JobFailedError(f"HOROVOD_ELASTIC_TIMEOUT is a number of seconds from 1, not {text!r}", WRONG_SETTINGS)
        fewest, most = min_num_proc or 1, max_num_proc or sys.maxsize
        roster = Roster(fewest, fewest, most, patience_s=float(patience_s))
        self.dispatcher = Dispatcher(roster, discovery.find_available_hosts_and_slots, rendezvous.init)
        self._rendezvous = rendezvous

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> Any:
        """Return at once: the roster waits for workers."""
        return SimpleNamespace(host_assignment_order=[])

    def start(self, num_proc: int, create_worker_fn: RunWorker) -> None:
        """Start the workers; the first world waits for `num_proc` of them."""
        self.dispatcher.start(num_proc, create_worker_fn, self.interrupted)

    def get_results(self) -> Any:
        """Wait for the end. Raises: JobFailedError: with an exit code, unless done or interrupted."""
        finish = self.dispatcher.wait_for_end()
        if finish.exit_code == 0 or self.interrupted.is_set():
            return SimpleNamespace(error_message=None, worker_results={})
        raise JobFailedError(finish.reason, finish.exit_code)

    def stop(self, error_message: str | None = None) -> None:
        """Stop looking for hosts and answering workers."""
        self.dispatcher.stop()
        self._rendezvous.stop()


# Horovod's functions, which our replacements call.
_register_shutdown_event = gloo_run.register_shutdown_event
_create_slot_env_vars = gloo_run.create_slot_env_vars
_create_run_env_vars = gloo_run.create_run_env_vars


def _kept_event() -> threading.Event:
    Driver.interrupted = _register_shutdown_event()
    return Driver.interrupted


def _slot_variables(slot_info: Any) -> dict[str, str]:
    ours = slot_info.environment if isinstance(slot_info, RankAssignment) else {}
    likely = client.for_worker_on(slot_info.hostname, Driver.interfaces)
    found = Driver.listen_at(likely) or likely
    of_driver = {client.ADDRESS: found[0], DRIVER_ADDRESSES: ",".join(found), INTERFACES: ",".join(Driver.interfaces)}
    return {**_create_slot_env_vars(slot_info), **of_driver, **ours}


def _run_variables(server_ip: str, nics: Collection[str], port: int, elastic: bool = False) -> dict[str, Any]:
    variables = _create_run_env_vars(server_ip, nics, port, elastic)
    of_workers = (client.ADDRESS, client.GLOO_INTERFACE, client.NCCL_INTERFACES)
    return {name: value for name, value in variables.items() if name not in of_workers}


def _named_interfaces(settings: Any, *_hosts: Any, **_unused: Any) -> set[str]:
    Driver.interfaces = client.named_interfaces(os.environ, settings.nics)
    return set(network.get_local_intfs())  # the loopback, for Horovod; no worker gets it


def _remote_command(*arguments: Any, **named: Any) -> str:
    return str(get_remote_command(*arguments, **named)).replace("ssh ", f"ssh {SSH_OPTIONS} ", 1)


def _handler(driver: Driver) -> Any:
    dispatcher = driver.dispatcher
    answers: Mapping[str, Callable[[int], str]] = {
        "heartbeat": dispatcher.heartbeat_received,
        "leaving": dispatcher.signal_received,
        "may_ask": dispatcher.may_ask,
        "problem": dispatcher.problem_of,
        "elsewhere": dispatcher.elsewhere,
    }

    class Handler(create_rendezvous_handler(driver)):  # type: ignore[misc]  # Horovod has no types
        """Horovod's handler, with the requests of our workers."""

        def do_GET(self) -> None:  # noqa: N802  # the name that http.server calls
            with suppress(ConnectionError):  # a worker that dies while it waits is no error
                super().do_GET()

        def do_PUT(self) -> None:  # noqa: N802
            if self.path.startswith(_WRITABLE):
                super().do_PUT()
            else:  # Horovod would unpickle what its own workers write
                self.send_status_code(HTTPStatus.NOT_FOUND)

        def _get_value(self, scope: str, key: str) -> bytes | None:
            if scope in answers:
                return answers[scope](int(key)).encode()
            if scope == "rank_and_size":
                host, _, number = key.partition(":")
                ranks = dispatcher.wait_for_ranks(host, int(number)) or INVALID_SLOT_INFO
                return str(ranks.to_response_string()).encode()
            value: bytes | None = super()._get_value(scope, key)
            return value

        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            if scope == "facts":
                dispatcher.facts_received(int(key), json.loads(value), self.client_address[0])
            elif scope == "exit_report":
                dispatcher.exit_report_received(int(key), ExitReport(**json.loads(value)))
            elif scope == "connect_error":
                dispatcher.connect_error_received(int(key), value.decode())
            else:
                super()._put_value(scope, key, value)

    return Handler


REPLACEMENTS: Sequence[tuple[ModuleType, str, Any]] = (
    (discovery, "HostDiscoveryScript", HostCommand),  # a bad line, or one failure, must not end the job
    (gloo_run, "ElasticDriver", Driver),  # our roster decides who is in the world, and when
    (gloo_run, "create_rendezvous_handler", _handler),  # workers send heartbeats, facts and exit reports
    (gloo_run, "RendezvousServer", DriverServer),  # it would listen at all addresses of this host
    (gloo_run, "create_slot_env_vars", _slot_variables),  # a worker keeps its number while ranks change
    (driver_service, "get_common_interfaces", _named_interfaces),  # later hosts cannot be asked now
    (gloo_run, "create_run_env_vars", _run_variables),  # it gives one address to all, perhaps the loopback
    (gloo_run, "register_shutdown_event", _kept_event),  # the job must wait for the last commits
    (gloo_run, "get_remote_command", _remote_command),  # ssh would wait for a lost host, or ask a password
)


def main() -> None:
    """Run horovodrun's command line; with a host discovery script the job is elastic, with our driver."""
    outlive()  # else the threads that forward output would end with their console, and workers block
    for module, name, ours in REPLACEMENTS:
        setattr(module, name, ours)
    os.environ.pop(client.ADDRESS, None)  # it may be an outer job's
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    launch.run_commandline()


if __name__ == "__main__":
    main()
