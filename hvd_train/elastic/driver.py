"""Horovod's launcher with a driver of our own: `python -m hvd_train.elastic.driver` takes what horovodrun takes.

Horovod's own driver bars a host after one crash, asks members to wait while newcomers import, never notices a
silent worker, and takes the first exit code 0 for the end of the job. Who may be in the world, and when, is decided
in `roster`; here that meets Horovod's host discovery, its ssh and its rendezvous server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from horovod.runner import gloo_run, launch
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
from horovod.runner.common.util.outcome import JobFailedError
from horovod.runner.elastic import discovery
from horovod.runner.elastic.rendezvous import create_rendezvous_handler

from hvd_train.elastic import orphans
from hvd_train.elastic.roster import COMMITTED, End, Finish, Form, Order, Roster, Start, Worker
from hvd_train.launch import roll_call
from hvd_train.launch.launcher import GOES_ON, JOB, REPLACES, SLOT, SUPERVISOR, WORKER

# What a worker's environment has unless the user says otherwise.
DEFAULTS = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "6",  # to meet: all are ready by then; one that dies just there costs as much
    "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": "5",  # a peer that says nothing in an operation
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",  # a rank that does not come to an operation while others wait
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "180",
    "HOROVOD_LOG_LEVEL": "fatal",  # a lost connection is an event here, told in a line of ours
}
# A host that is gone is noticed by ssh itself, and nothing asks for a password.
SSH = "-o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=1 -o ServerAliveCountMax=3"

JOB_NAME = uuid.uuid4().hex
_TICK_S = 0.1
_DISCOVERY_S = 1.0
_COMMAND_S = 30.0
_QUIET_S, _LAST_COMMIT_S = 3.0, 30.0
_MEETING_S = 1.0  # one that leaves does so when the others have met: its end takes a core for as long as they need
_LEAVE_S = 5.0  # a worker that was told to go has so long to do it by itself
START_WORKER = Callable[[SlotInfo, list[threading.Event]], tuple[int, float]]


@dataclass
class Seat(SlotInfo):  # type: ignore[misc]  # Horovod has no types
    """A worker's rank, with what stays the same while ranks change."""

    worker: int = 0
    slot: int = 0
    replaces: int | None = None
    goes_on: bool = False

    def variables(self) -> dict[str, str]:
        """What its process finds in its environment."""
        replaces = {} if self.replaces is None else {REPLACES: str(self.replaces)}
        goes_on = {GOES_ON: "1"} if self.goes_on else {}
        return {JOB: JOB_NAME, WORKER: str(self.worker), SLOT: str(self.slot), **replaces, **goes_on}


@dataclass
class Running:
    """A worker's process: how it is ended, and the rank it has been given."""

    ended_by: threading.Event = field(default_factory=threading.Event)
    seat: Seat | None = None
    waiting: bool = False
    problem: str = ""
    """Why it cannot join this job."""


class HostCommand:
    """The user's command that prints hosts, as `NAME:SLOTS` lines. Horovod's own lets a bad line end the job."""

    def __init__(self, command: str, slots: int | None) -> None:
        self._command, self._slots = command, slots or 1

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Hosts by name. Raises ValueError, in one line, where the command fails or prints something else."""
        done = subprocess.run(
            ["sh", "-c", self._command], capture_output=True, text=True, check=False, timeout=_COMMAND_S
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or [f"{self._command} ended with exit code {done.returncode}"]
            raise ValueError(said[-1])
        hosts = {}
        for line in filter(None, map(str.strip, done.stdout.splitlines())):
            name, _, slots = line.partition(":")
            if slots and not slots.isdigit():
                raise ValueError(f"{self._command} printed {line!r}, which is not NAME:SLOTS")
            hosts[name] = int(slots or self._slots)
        return hosts


class Driver:
    """What Horovod's launcher asks of an elastic driver, and what its rendezvous server asks of it."""

    interrupted = threading.Event()
    """Set by a signal to the launcher, which has told the workers to end by then."""

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
        self._rendezvous, self._discovery = rendezvous, discovery
        most = max_num_proc or sys.maxsize
        self._roster = Roster(min_num_proc or 1, min_num_proc or 1, most, patience_s=float(timeout or 600))
        self._changed = threading.Condition()
        self._running: dict[int, Running] = {}
        self._by_rank_key: dict[tuple[str, int], int] = {}
        self._last_in: dict[tuple[str, int], int] = {}  # the number of the worker that a place has, or had last
        self._answer = threading.local()
        self._finish: Finish | None = None
        self._create_worker: START_WORKER | None = None
        self._stopped = threading.Event()
        self._problem = ""
        self._facts: Mapping[str, str] | None = None  # what the job runs: the first worker's versions and settings
        self._last_word = 0.0  # when a worker last said that it lives

    # ---------------------------------------------------------------------------------- what the launcher asks

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> Any:
        """Wait until hosts with so many slots are known; one host will do, whatever `min_hosts` says."""
        deadline = time.monotonic() + self._roster.patience_s
        while True:
            self._discover()
            if sum(self._roster.hosts.values()) >= min_num_proc:
                return SimpleNamespace(host_assignment_order=list(self._roster.hosts))
            if time.monotonic() > deadline:
                raise JobFailedError(f"no hosts with {min_num_proc} slots were found; {self._problem}", 1)
            if self._stopped.wait(_DISCOVERY_S):
                raise JobFailedError("stopped while waiting for hosts", 1)

    def start(self, num_proc: int, create_worker: START_WORKER) -> None:
        """Start workers; the first world waits for `num_proc` of them."""
        self._roster.first, self._create_worker = max(num_proc, self._roster.fewest), create_worker
        threading.Thread(target=self._run_to_the_end, daemon=True).start()

    def get_results(self) -> Any:
        """Wait for the end of the job. Raises JobFailedError with its exit code unless it succeeded."""
        with self._changed:
            while self._finish is None or self._running:
                self._changed.wait(1.0)
        if self._finish.exit_code == 0 or self.interrupted.is_set():
            return SimpleNamespace(error_message=None, worker_results={})
        raise JobFailedError(self._finish.why, self._finish.exit_code)

    def stop(self, error_message: str | None = None) -> None:
        """The job is over."""
        self._stopped.set()
        self._rendezvous.stop()

    # --------------------------------------------------------------------- what workers ask, in threads of the server

    def introduced(self, number: int, facts: Mapping[str, str]) -> None:
        """A worker says what it runs, before it asks for a rank."""
        with self._changed:
            self._facts = self._facts or facts
            if (running := self._running.get(number)) is not None:
                running.problem = roll_call.stranger(self._facts, facts) or ""

    def stranger(self, number: int) -> bytes:
        """Why a worker that has introduced itself cannot join; nothing where it can."""
        with self._changed:
            running = self._running.get(number)
            return running.problem.encode() if running else b""

    def record_ready(self, host: str, local_rank: int) -> None:
        """Wait until a worker has a rank. It asks by its number at first, by host and local rank later."""
        with self._changed:
            number = self._by_rank_key.get((host, local_rank), local_rank)
            running = self._running.get(number)
            if running is None:
                self._answer.seat = None
                return
            running.seat, running.waiting = None, True
            self._roster.asked(number, time.monotonic())
            self._changed.notify_all()
            while running.seat is None and running.waiting and not self.interrupted.is_set():
                self._changed.wait(1.0)
            running.waiting = False
            self._answer.seat = running.seat
        if self._answer.seat is None:
            self._stopped.wait(_MEETING_S)

    def get_slot_info(self, host: str, local_rank: int) -> SlotInfo:
        """What the wait in `record_ready`, in the same thread, has brought."""
        return self._answer.seat or INVALID_SLOT_INFO

    def heard(self, number: int) -> bytes:
        """A worker says that it lives; what it should do."""
        with self._changed:
            self._last_word = time.monotonic()
            if self.interrupted.is_set():
                return b"stop"
            worker = self._roster.worker(number)
            if worker is None or self._running[number].ended_by.is_set():
                return b"end"
            self._roster.heard(number, time.monotonic())
            return b"change" if self._roster.wants_change() else b"train"

    def asking(self, number: int) -> bytes:
        """A worker is about to ask for its next rank, unless it has been given up."""
        with self._changed:
            return b"end" if self._roster.worker(number) is None else b"ask"

    def register_worker_server(self, host: str, slot: int, addresses: Any, secret: Any) -> None:
        """Workers are told of changes when they say that they live."""

    # -------------------------------------------------------------------------------------------------- inside

    def _run_to_the_end(self) -> None:
        try:
            self._run()
        finally:  # a fault of ours, too, ends the job
            with self._changed:
                self._finish = self._finish or Finish(1, "the driver failed (see above)")
                for running in self._running.values():
                    running.ended_by.set()
                self._changed.notify_all()

    def _run(self) -> None:
        threading.Thread(target=self._watch_hosts, daemon=True).start()
        supervisor = os.environ.pop(SUPERVISOR, None)
        while self._finish is None:
            if supervisor and os.getppid() != int(supervisor):
                supervisor = None
                os.kill(os.getpid(), signal.SIGTERM)  # nobody watches over this job any more: commit and end
            if self.interrupted.is_set():
                self._wait_for_the_end()
                continue
            with self._changed:
                orders = self._roster.orders(time.monotonic())
                over = any(isinstance(order, Finish) for order in orders)
                for order in orders:
                    self._carry_out(order, quietly=over)
                if self._finish is None:
                    self._changed.wait(_TICK_S)

    def _wait_for_the_end(self) -> None:
        """The workers have been told to end: those of other hosts, whose ssh has ended already, when they report."""
        deadline = time.monotonic() + _LAST_COMMIT_S
        with self._changed:
            self._changed.notify_all()  # whoever waits for a rank does so in vain
            while time.monotonic() < deadline:
                if not self._running and time.monotonic() - self._last_word > _QUIET_S:
                    break
                self._changed.wait(_TICK_S)
            self._finish = Finish(1, "stopped")
            self._changed.notify_all()

    def _watch_hosts(self) -> None:
        """In a thread of its own: ranks that meet do not wait for the user's command."""
        while not self._stopped.wait(_DISCOVERY_S):
            self._discover()

    def _discover(self) -> None:
        """The hosts of the list; where it cannot be had, those of the last one."""
        try:
            hosts = self._discovery.find_available_hosts_and_slots()
        except (ValueError, OSError, subprocess.SubprocessError) as error:
            if str(error) != self._problem:
                say(f"hosts: {error}; going on with the last list")
            self._problem = str(error)
            return
        self._problem = ""
        with self._changed:
            self._roster.found(hosts)
            self._changed.notify_all()

    def _carry_out(self, order: Order, *, quietly: bool) -> None:
        if isinstance(order, Start):
            self._running[order.worker.number] = Running()
            threading.Thread(target=self._live, args=(order.worker,), daemon=True).start()
        elif isinstance(order, End):
            self._end(order, quietly=quietly)
        elif isinstance(order, Form):
            self._form(order.workers)
        else:
            self._finish = order
        self._changed.notify_all()

    def _live(self, worker: Worker) -> None:
        """The life of a worker's process."""
        assert self._create_worker is not None
        # Until it asks it has no rank: its number stands in for that, and it shares its host with all slots.
        slots = self._roster.hosts.get(worker.host, 1)
        place = (worker.host, worker.slot)
        replaces, self._last_in[place] = self._last_in.get(place), worker.number
        goes_on = self._roster.formed > 0
        seat = Seat(worker.host, 0, worker.number, 0, 1, slots, 1, worker.number, worker.slot, replaces, goes_on)
        code, _ = self._create_worker(seat, [self._running[worker.number].ended_by])
        with self._changed:
            expected = (
                self._finish is not None or code in (0, *COMMITTED) or self._running[worker.number].ended_by.is_set()
            )
            if not expected:
                say(f"worker {worker} ended with exit code {code}")
            self._running.pop(worker.number).waiting = False
            self._roster.ended(worker.number, code, time.monotonic())
            self._changed.notify_all()

    def _end(self, order: End, *, quietly: bool) -> None:
        running = self._running.get(order.worker.number)
        if running is None:
            return
        if not quietly:
            say(f"worker {order.worker} is taken out: {order.why}")
        if order.at_once:  # on another host its successor does it
            orphans.clear_away(str(order.worker.number), JOB_NAME)
        if running.waiting:  # it leaves by itself when it hears that there is no rank for it
            running.waiting = False
            timer = threading.Timer(_LEAVE_S, running.ended_by.set)
            timer.daemon = True
            timer.start()
        else:
            running.ended_by.set()

    def _form(self, workers: tuple[Worker, ...]) -> None:
        seats = seats_of(workers)
        self._rendezvous.init(seats)
        self._by_rank_key = {(seat.hostname, seat.local_rank): seat.worker for seat in seats}
        for seat in seats:
            if (running := self._running.get(seat.worker)) is not None:
                running.seat = seat


def seats_of(workers: tuple[Worker, ...]) -> list[Seat]:
    """Ranks in the given order; local ranks count the workers of a host, cross ranks the hosts of a local rank."""
    on_host: Counter[str] = Counter(worker.host for worker in workers)
    with_local_rank: dict[int, list[str]] = defaultdict(list)
    local_ranks = []
    seen: Counter[str] = Counter()
    for worker in workers:
        local_ranks.append(seen[worker.host])
        with_local_rank[seen[worker.host]].append(worker.host)
        seen[worker.host] += 1
    return [
        Seat(
            hostname=worker.host,
            rank=rank,
            local_rank=local_rank,
            cross_rank=with_local_rank[local_rank].index(worker.host),
            size=len(workers),
            local_size=on_host[worker.host],
            cross_size=len(with_local_rank[local_rank]),
            worker=worker.number,
            slot=worker.slot,
        )
        for rank, (worker, local_rank) in enumerate(zip(workers, local_ranks, strict=True))
    ]


def say(line: str) -> None:
    """One line to the user."""
    print(f"hvd-train: {line}", file=sys.stderr, flush=True)


def main() -> None:
    """As horovodrun; with a host discovery script the job is elastic, with this driver."""
    slot_variables: Callable[[SlotInfo], dict[str, str]] = gloo_run.create_slot_env_vars

    def variables(seat: SlotInfo) -> Mapping[str, str]:
        return {**slot_variables(seat), **(seat.variables() if isinstance(seat, Seat) else {})}

    def handler(driver: Driver) -> Any:
        class Handler(create_rendezvous_handler(driver)):  # type: ignore[misc]  # Horovod has no types
            """Answers workers that say that they live; one that dies while it waits is no error."""

            def do_GET(self) -> None:  # noqa: N802  # the name that http.server calls
                with suppress(ConnectionError):
                    super().do_GET()

            def _get_value(self, scope: str, key: str) -> bytes | None:
                if scope == "alive":
                    return driver.heard(int(key))
                if scope == "asking":
                    return driver.asking(int(key))
                if scope == "stranger":
                    return driver.stranger(int(key))
                value: bytes | None = super()._get_value(scope, key)
                return value

            def _put_value(self, scope: str, key: str, value: bytes) -> None:
                if scope == "facts":
                    driver.introduced(int(key), json.loads(value))
                else:
                    super()._put_value(scope, key, value)

        return Handler

    register: Callable[[], threading.Event] = gloo_run.register_shutdown_event

    def interrupted() -> threading.Event:
        Driver.interrupted = register()
        return Driver.interrupted

    gloo_run.register_shutdown_event = interrupted
    discovery.HostDiscoveryScript = HostCommand
    gloo_run.ElasticDriver = Driver
    gloo_run.create_slot_env_vars = variables
    gloo_run.create_rendezvous_handler = handler
    remote: Callable[..., str] = gloo_run.get_remote_command
    gloo_run.get_remote_command = lambda *args, **named: remote(*args, **named).replace("ssh ", f"ssh {SSH} ", 1)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    launch.run_commandline()


if __name__ == "__main__":
    main()
