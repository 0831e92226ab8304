"""Horovod's launcher with a driver of our own: `python -m hvd_train.elastic.driver` takes what horovodrun takes.

Horovod's own driver bars a host after one crash, lets members wait while newcomers import, never notices a silent
worker, and takes the first exit code 0 for the end of the job. Here `dispatcher` and `roster` take its place. What is
used of Horovod is its command line, its ssh and its rendezvous server.

REPLACEMENTS lists every part of Horovod's launcher that is replaced while this process runs, and why.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from horovod.runner import gloo_run, launch
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
from horovod.runner.common.util.outcome import JobFailedError
from horovod.runner.driver import driver_service
from horovod.runner.elastic import discovery
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.util import network

from hvd_train.console import outlive
from hvd_train.elastic.discovery import HostCommand
from hvd_train.elastic.dispatcher import Dispatcher, RunWorker
from hvd_train.elastic.ranks import RankAssignment
from hvd_train.elastic.roster import Roster
from hvd_train.elastic.worker import WRONG_SETTINGS
from hvd_train.launch import addresses, client, last_word
from hvd_train.launch.launcher import DRIVER_ADDRESSES, INTERFACES
from hvd_train.numerals import whole_number

# What the environment of a worker holds unless the user sets something else.
DEFAULTS = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "6",  # to meet: all are ready by then, and one that dies there costs all as much
    "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": "5",  # for a peer that is silent during an operation
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",  # for a rank that does not come to an operation while others wait
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "180",
    "HOROVOD_LOG_LEVEL": "fatal",  # a lost connection is an ordinary event here, reported in a line of ours
}
# No prompt for a password, and an ssh without a heartbeat of its worker yet ends a minute after its host is gone.
SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=20"

# Where ranks that connect write their addresses, and look for those of others. An answer that is neither 200 nor 404,
# three times within 1.5 s, ends the attempt; otherwise they look again until HOROVOD_GLOO_TIMEOUT_SECONDS are over.
_OF_GLOO = ("/global", "/local_", "/cross_")
_OF_WORKERS = ("/facts/", "/last_word/", "/not_met/")


class Store(RendezvousServer):  # type: ignore[misc]  # Horovod has no types
    """Horovod's rendezvous server, which listens where workers need it: at first on this host alone."""

    def __init__(self, verbose: int = 0) -> None:
        super().__init__(verbose)
        self._lock = threading.Lock()
        self._listens_at = {addresses.LOOPBACK}
        Driver.listen_at = self.listen_at

    def start(self, handler_cls: Any) -> int:
        """Begin to answer, and return the port."""
        port: int = super().start(handler_cls, addresses.LOOPBACK)
        return port

    def listen_at(self, wanted: Sequence[str]) -> list[str]:
        """Listen at these addresses of this host, too, and return those at which the server can be reached now."""
        with self._lock:
            for address in wanted:
                if address not in self._listens_at:
                    with suppress(OSError):  # the port may be in use there
                        self.also_listen_at(address)
                        self._listens_at.add(address)
            return [address for address in wanted if address in self._listens_at]


class Driver:
    """Takes the place of Horovod's ElasticDriver: passes on to our dispatcher what the launcher and the server ask."""

    interrupted: ClassVar[threading.Event] = threading.Event()
    """Horovod's event for a signal to the launcher, which has told the workers to end by then."""

    interfaces: ClassVar[Sequence[str]] = ()
    """The network interfaces that the user has named, if any."""

    listen_at: ClassVar[Callable[[Sequence[str]], list[str]]] = list
    """Lets the store be reached at some addresses of this host (`Store.listen_at`)."""

    def __init__(
        self,
        rendezvous: Any,
        discovery: Any,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Any = None,
        verbose: int = 0,
    ) -> None:
        """Take Horovod's arguments; the last three have no meaning here.

        Raises JobFailedError where `HOROVOD_ELASTIC_TIMEOUT` is no number of seconds.
        """
        least, most = min_num_proc or 1, max_num_proc or sys.maxsize
        roster = Roster(least, least, most, patience_s=float(timeout or _patience_s(os.environ)))
        self.dispatcher = Dispatcher(roster, discovery.find_available_hosts_and_slots, rendezvous.init)
        self._rendezvous = rendezvous
        self._answer = threading.local()

    # ------------------------------------------------------------------------------ asked by Horovod's launcher

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> Any:
        """Wait for nothing: the roster waits for workers, and says so."""
        return SimpleNamespace(host_assignment_order=[])

    def start(self, num_proc: int, create_worker_fn: RunWorker) -> None:
        """Start the workers; the first world waits for `num_proc` of them."""
        self.dispatcher.start(num_proc, create_worker_fn, self.interrupted)

    def get_results(self) -> Any:
        """Wait for the end of the job. Raises JobFailedError with its exit code unless it was done or interrupted."""
        finish = self.dispatcher.wait_for_end()
        if finish.exit_code == 0 or self.interrupted.is_set():
            return SimpleNamespace(error_message=None, worker_results={})
        raise JobFailedError(finish.reason, finish.exit_code)

    def stop(self, error_message: str | None = None) -> None:
        """Stop looking for hosts and answering workers."""
        self.dispatcher.stop()
        self._rendezvous.stop()

    # -------------------------------------------------------------------- asked by Horovod's rendezvous server

    def record_ready(self, host: str, slot: int) -> None:
        """Wait until the worker with this host and local rank (at first its number) has ranks in a new world."""
        self._answer.ranks = self.dispatcher.wait_for_ranks(host, slot)

    def get_slot_info(self, host: str, slot: int) -> SlotInfo:
        """Return the ranks that `record_ready`, just before in the same thread, has waited for."""
        ranks: RankAssignment | None = self._answer.ranks
        return slot_info(ranks) if ranks else INVALID_SLOT_INFO

    def register_worker_server(self, host: str, slot: int, addresses: Any, secret_key: Any) -> None:
        """Do nothing: workers learn of changes from the answers to their heartbeats."""


def _patience_s(environ: Mapping[str, str]) -> int:
    text = environ.get("HOROVOD_ELASTIC_TIMEOUT") or "600"
    seconds = whole_number(text)
    if not seconds:
        raise JobFailedError(f"HOROVOD_ELASTIC_TIMEOUT is a number of seconds from 1, not {text!r}", WRONG_SETTINGS)
    return seconds


def slot_info(ranks: RankAssignment) -> SlotInfo:
    """Return the ranks of a worker in Horovod's form."""
    return SlotInfo(
        hostname=ranks.hostname,
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        cross_rank=ranks.cross_rank,
        size=ranks.size,
        local_size=ranks.local_size,
        cross_size=ranks.cross_size,
    )


# Each of these takes a function of Horovod's and returns what replaces it.


def _keeping_the_event(register_shutdown_event: Callable[[], threading.Event]) -> Callable[[], threading.Event]:
    def replacement() -> threading.Event:
        Driver.interrupted = register_shutdown_event()
        return Driver.interrupted

    return replacement


def _with_our_variables(create_slot_env_vars: Callable[[Any], dict[str, str]]) -> Callable[[Any], dict[str, str]]:
    def replacement(slot_info: Any) -> dict[str, str]:
        ours = slot_info.environment if isinstance(slot_info, RankAssignment) else {}
        likely = addresses.for_worker_on(slot_info.hostname, Driver.interfaces)
        found = Driver.listen_at(likely) or likely
        where = {client.ADDRESS: found[0], DRIVER_ADDRESSES: ",".join(found), INTERFACES: ",".join(Driver.interfaces)}
        return {**create_slot_env_vars(slot_info), **where, **ours}

    return replacement


def _without_a_search(_: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(
        settings: Any,
        all_host_names: Sequence[str],
        remote_host_names: Sequence[str] | None = None,
        fn_cache: Any = None,
    ) -> set[str]:
        Driver.interfaces = addresses.named_interfaces(os.environ, settings.nics)
        loopbacks: set[str] = network.get_local_intfs()  # something for Horovod, which no worker is told
        return loopbacks

    return replacement


def _without_addresses(create_run_env_vars: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def replacement(server_ip: str, nics: Collection[str], port: int, elastic: bool = False) -> dict[str, Any]:
        variables = create_run_env_vars(server_ip, nics, port, elastic)
        workers_own = (client.ADDRESS, addresses.GLOO_INTERFACE, addresses.NCCL_INTERFACES)
        return {name: value for name, value in variables.items() if name not in workers_own}

    return replacement


def _with_our_requests(create_rendezvous_handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def replacement(driver: Driver) -> Any:
        dispatcher = driver.dispatcher
        answers = {
            "heartbeat": dispatcher.heartbeat_received,
            "leaving": dispatcher.signal_received,
            "may_ask": dispatcher.may_ask,
            "problem": dispatcher.problem_of,
            "elsewhere": dispatcher.elsewhere,
        }

        class Handler(create_rendezvous_handler(driver)):  # type: ignore[misc]  # Horovod has no types
            """Horovod's rendezvous server, with the requests of our workers."""

            def do_GET(self) -> None:  # noqa: N802  # the name that http.server calls
                with suppress(ConnectionError):  # a worker that dies while it waits is no error
                    if self.path.startswith(_OF_GLOO) and dispatcher.world_is_broken():
                        self.send_status_code(
                            HTTPStatus.GONE
                        )  # one of them is dead: whoever waits for it waits in vain
                    else:
                        super().do_GET()

            def do_PUT(self) -> None:  # noqa: N802
                if self.path.startswith((*_OF_GLOO, *_OF_WORKERS)):
                    super().do_PUT()
                else:  # whatever Horovod's own workers write would be unpickled
                    self.send_status_code(HTTPStatus.NOT_FOUND)

            def _get_value(self, scope: str, key: str) -> bytes | None:
                if scope in answers:
                    return answers[scope](int(key)).encode()
                value: bytes | None = super()._get_value(scope, key)
                return value

            def _put_value(self, scope: str, key: str, value: bytes) -> None:
                if scope == "facts":
                    dispatcher.heard_from(self.client_address[0])
                    dispatcher.facts_received(int(key), json.loads(value))
                elif scope == "last_word":
                    dispatcher.last_word_received(int(key), last_word.heard(value))
                elif scope == "not_met":
                    dispatcher.not_met(int(key), value.decode())
                else:
                    super()._put_value(scope, key, value)

        return Handler

    return replacement


def _with_our_options(get_remote_command: Callable[..., str]) -> Callable[..., str]:
    def replacement(*arguments: Any, **named: Any) -> str:
        return get_remote_command(*arguments, **named).replace("ssh ", f"ssh {SSH_OPTIONS} ", 1)

    return replacement


@dataclass(frozen=True)
class Replacement:
    """One name in a module of Horovod's launcher that stands for something of ours while this process runs."""

    module: ModuleType
    name: str
    parameters: str
    """The parameters of Horovod's function or class, which ours takes as well; a test compares them."""
    make: Callable[[Any], Any]
    """Takes what Horovod has under the name, and returns what replaces it."""
    why: str


REPLACEMENTS = (
    Replacement(
        discovery,
        "HostDiscoveryScript",
        "discovery_script slots",
        lambda _: HostCommand,
        why="A line that is no host, or a command that fails once, must not end the job.",
    ),
    Replacement(
        gloo_run,
        "ElasticDriver",
        "rendezvous discovery min_num_proc max_num_proc timeout reset_limit cooldown_range verbose",
        lambda _: Driver,
        why="Who may be in the world, and when, is for our roster to decide.",
    ),
    Replacement(
        gloo_run,
        "create_rendezvous_handler",
        "driver",
        _with_our_requests,
        why="Workers send heartbeats and say what they run; a worker that dies while it waits prints no traceback.",
    ),
    Replacement(
        gloo_run,
        "RendezvousServer",
        "verbose",
        lambda _: Store,
        why="It would listen at all addresses of this host, whether or not a worker is anywhere else.",
    ),
    Replacement(
        gloo_run,
        "create_slot_env_vars",
        "slot_info",
        _with_our_variables,
        why="A worker needs the number, the job and the slot that stay its own while its ranks change.",
    ),
    Replacement(
        driver_service,
        "get_common_interfaces",
        "settings all_host_names remote_host_names fn_cache",
        _without_a_search,
        why="Hosts that come later are not there to be asked at the start, when Horovod settles what all are to use.",
    ),
    Replacement(
        gloo_run,
        "create_run_env_vars",
        "server_ip nics port elastic",
        _without_addresses,
        why="Horovod gives one address and interface to all: the loopback's where a job begins on this host alone.",
    ),
    Replacement(
        network,
        "resolve_host_address",
        "host_name",
        lambda _: addresses.resolved,
        why="Where this host's own name leads to 127.0.1.1, Horovod takes it for another host, and needs ssh to it.",
    ),
    Replacement(
        gloo_run,
        "register_shutdown_event",
        "",
        _keeping_the_event,
        why="On a signal the job must wait for the last commits, and Horovod keeps the event to itself.",
    ),
    Replacement(
        gloo_run,
        "get_remote_command",
        "local_command host port identity_file timeout_s reads_stdin",
        _with_our_options,
        why="Horovod's ssh would wait for minutes for a host that is gone, ask for passwords, and hide exit codes.",
    ),
)


def main() -> None:
    """Run horovodrun's command line; with a host discovery script the job is elastic, with our driver."""
    outlive()  # the threads that forward what workers print would end with their console, and workers block
    for replacement in REPLACEMENTS:
        original = getattr(replacement.module, replacement.name)
        setattr(replacement.module, replacement.name, replacement.make(original))
    os.environ.pop(client.ADDRESS, None)  # of a job in which this one is started: each worker gets the address it needs
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    launch.run_commandline()


if __name__ == "__main__":
    main()
