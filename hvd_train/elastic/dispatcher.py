"""Run an elastic job: start, end and answer its workers, as the roster decides.

A worker talks to the driver over HTTP, through Horovod's rendezvous server; N is the worker's
number.

request                   when                                answer
GET heartbeat/N-KNOWN     from its start                      `train`, `change`, `stop` or `end`
GET leaving/N-KNOWN       instead, after a signal to it       the same
GET problem/N             when it has built the model, with   why it cannot join the job, or nothing
                          its facts
GET rank_and_size/HOST:N  then, for its first rank            its rank in a new world; -1 to leave
GET elsewhere/N           before it connects to the others    the driver's address for other hosts
PUT run_dir/N             when it has claimed the run folder
PUT left/N                when it leaves its world: its steps, and why it could not connect there
GET rank_and_size/HOST:N  for its next rank, by the core      the same
PUT exit_report/N         when it, or its training, ends

The answer to a heartbeat comes when it is not the KNOWN one. Until then the driver sends a byte,
and another one for each byte from the worker, which comes each second. The answer `change` asks a
member to leave its world after the next step, `stop` asks it to commit and end, and `end` says that
the worker is evicted. A worker ends with its process, on another host with its ssh; if it outlives
its ssh, it is evicted.
"""

import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from horovod.runner.common.util.hosts import SlotInfo

from hvd_train.console import say
from hvd_train.elastic.roster import (
    COMMITTED,
    Command,
    End,
    Finish,
    FormWorld,
    Notice,
    Roster,
    Start,
    Worker,
)
from hvd_train.errors import UsageError
from hvd_train.launch import cause, roll_call, ssh, workers
from hvd_train.launch.exit_report import ExitReport
from hvd_train.launch.workers import JOB, REPLACES, RUN_DIR, SLOT, WORKER, Request

_TICK_S = 0.1
_REST = 9.0  # the pause after each look at the job, in multiples of what that took
_LONGEST_REST_S = 0.5
_LOOK_S = 1.0  # between two looks for hosts
_QUIET_S = 3.0
_LAST_COMMIT_S = 30.0
_BYTES_AT_ONCE = 64
_OF_SSH = 255  # ssh has failed, or a signal has killed its command
_BEFORE_ITS_FIRST_RANK = {
    "HOROVOD_ELASTIC": "1",
    "HOROVOD_RANK": "0",
    "HOROVOD_SIZE": "1",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
}

RunWorker = Callable[[Worker, Mapping[str, str], threading.Event], int]
"""Runs a worker's process with these variables until it ends or the event is set;
returns its exit code."""


def assign_ranks(workers: Sequence[Worker]) -> list[SlotInfo]:
    """Return the ranks of these workers, in the order of `workers`."""
    local_sizes = Counter[str]()  # by host, by local rank
    cross_sizes = Counter[int]()
    places = []
    for worker in workers:
        local_rank = local_sizes[worker.host]
        places.append((local_rank, cross_sizes[local_rank]))
        local_sizes[worker.host] += 1
        cross_sizes[local_rank] += 1
    return [
        SlotInfo(
            it.host, rank, local, cross, len(workers), local_sizes[it.host], cross_sizes[local]
        )
        for rank, (it, (local, cross)) in enumerate(zip(workers, places, strict=True))
    ]


@dataclass
class _WorkerProcess:
    end: threading.Event = field(default_factory=threading.Event)  # ends the process when set
    request: Future[SlotInfo | None] | None = None  # for a rank, while it waits

    def answer(self, ranks: SlotInfo | None = None) -> None:
        """Answer its request for a rank, if it waits; None means that it must leave."""
        if self.request is not None:
            self.request.set_result(ranks)
            self.request = None


class Dispatcher:
    """The processes of a job's workers: carries out the roster's commands, and answers
    workers in their own threads.
    """

    def __init__(
        self,
        roster: Roster,
        find_hosts: Callable[[], Mapping[str, int]],
        publish_world: Callable[[Sequence[SlotInfo]], None],
        run_worker: RunWorker,
        interrupted: threading.Event,
    ) -> None:
        """Start nothing yet.

        `publish_world` gets the ranks of each new world before its workers do. A signal sets
        `interrupted`.
        """
        self._roster = roster
        self._find_hosts = find_hosts
        self._publish_world = publish_world
        self._run_worker = run_worker
        self._interrupted = interrupted
        self._name = uuid.uuid4().hex
        self.run_dir = ""  # the run folder, once a worker has claimed it
        self._lock = threading.Lock()
        self._news = threading.Event()  # for the thread of the job
        self._requested: Request = "train"
        self._processes: dict[int, _WorkerProcess] = {}
        # the newest worker's number, by host and slot
        self._last_in_slot: dict[tuple[str, int], int] = {}
        self._finish: Finish | None = None
        self._facts: Mapping[str, str] | None = None  # versions and settings of the first worker
        self._last_heartbeat = 0.0
        self._errors = set[str]()  # errors of workers, without the numbers in them

    def run(self) -> Finish:
        """Run the job until it is over and no process is left; return how it finished."""
        try:
            # A rendezvous must not wait for the user's command.
            threading.Thread(target=self.watch_hosts, daemon=True).start()
            while self._finish is None:
                if self._interrupted.is_set():
                    self._wait_for_last_commits()
                else:
                    self._obey_commands()
        finally:  # also after an error of the driver
            with self._lock:
                self._finish = self._finish or Finish(1, "the driver failed (see above)")
                for process in self._processes.values():
                    process.end.set()
                    process.answer()
            while self._processes:
                self._news.wait()
                self._news.clear()
        return self._finish

    def watch_hosts(self) -> None:
        """Look for hosts every second until the job ends; after a failure the
        last list stays in force.
        """
        problem = ""
        while self._finish is None:
            try:
                hosts = self._find_hosts()
            except (UsageError, ValueError, OSError) as error:
                if str(error) != problem:
                    say(f"hosts: {error}; the last list stays in force")
                problem = str(error)
            else:
                problem = ""
                with self._lock:
                    self._roster.hosts_found(hosts)
                self._news.set()
            time.sleep(_LOOK_S)

    def problem_with(self, facts: Mapping[str, str]) -> str:
        """Return why a worker with these facts cannot join the first one; empty if it can."""
        with self._lock:
            self._facts = self._facts or facts
            return roll_call.disagreement([self._facts, facts]) or ""

    def wait_for_ranks(self, number: int) -> SlotInfo | None:
        """Wait for a worker's ranks in a new world; return None if it must leave."""
        with self._lock:
            process = self._processes.get(number)
            if process is None or process.end.is_set() or self._interrupted.is_set():
                return None
            process.request = request = process.request or Future()
            self._roster.rank_requested(number, time.monotonic())
        self._news.set()
        return request.result()

    def heartbeats(self, number: int, known: str, connection: socket.socket) -> str:
        """Take a worker's heartbeats, a byte each, until the answer is not `known` or
        the connection is closed.
        """
        while (answer := self._answer(number)) == known:
            connection.sendall(b".")
            if not connection.recv(_BYTES_AT_ONCE):
                break
        return answer

    def _answer(self, number: int) -> str:
        """Return the answer to a heartbeat, another one in each world."""
        return f"{self.heartbeat_received(number)}.{self._roster.worlds_formed}"

    def heartbeat_received(self, number: int) -> str:
        """Note that a worker is alive, and return the answer: train, change, stop or end."""
        with self._lock:
            now = self._last_heartbeat = time.monotonic()
            process = self._processes.get(number)
            # later the time for a last commit is over
            if self._interrupted.is_set() and self._finish is None:
                return "stop"
            if process is None or process.end.is_set():
                return "end"
            self._roster.heartbeat_received(number, now)
            return self._requested

    def signal_received(self, number: int) -> None:
        """Note that a worker got a signal."""
        with self._lock:
            self._roster.signal_received(number, time.monotonic())
        self._news.set()

    def world_left(self, number: int, step: int, connect_error: str) -> None:
        """Note the steps of a worker that leaves its world, and why it could not connect there."""
        with self._lock:
            self._roster.world_left(number, step, connect_error)

    def exit_report_received(self, number: int, report: ExitReport | None) -> None:
        """Note the exit report of a worker, or withdraw it, and print its error if it is new."""
        with self._lock:
            worker = self._roster.worker(number)
            if worker is None:
                return
            self._roster.exit_report_received(number, report, time.monotonic())
            # else its core's request for a rank would keep it alive
            self._processes[number].answer()
            self._news.set()
            if report is None:
                return
            kind = cause.kind_of(report.error)
            if report.error and kind not in self._errors:
                separator = "\n" if "\n" in report.error else " "
                say(f"worker {worker}:{separator}{report.error}")
            self._errors.add(kind)

    def _obey_commands(self) -> None:
        self._news.clear()
        begun = time.thread_time()
        with self._lock:
            for command in self._roster.commands(time.monotonic()):
                self._carry_out(command)
            self._requested = self._roster.requested()
        time.sleep(min(_REST * (time.thread_time() - begun), _LONGEST_REST_S))
        if self._finish is None:
            self._news.wait(_TICK_S)

    def _wait_for_last_commits(self) -> None:
        """Wait until the workers end; on other hosts, until their heartbeats cease."""
        with self._lock:
            for process in self._processes.values():
                process.answer()
        deadline = time.monotonic() + _LAST_COMMIT_S
        while time.monotonic() < deadline:
            if not self._processes and time.monotonic() - self._last_heartbeat > _QUIET_S:
                break
            time.sleep(_TICK_S)
        self._finish = Finish(1, "stopped")

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Start):
            process = self._processes[command.worker.number] = _WorkerProcess()
            arguments = command.worker, process, self._environment_of(command.worker)
            threading.Thread(target=self._run_to_exit, args=arguments, daemon=True).start()
        elif isinstance(command, End):
            process = self._processes[command.worker.number]
            if command.reason:
                say(f"worker {command.worker} is evicted: {command.reason}")
            if command.kill:  # on another host its successor does this
                workers.kill(str(command.worker.number), self._name)
            if command.kill or process.request is None:
                process.end.set()
            process.answer()  # a worker that gets no rank leaves by itself
        elif isinstance(command, FormWorld):
            assignments = assign_ranks(command.workers)
            self._publish_world(assignments)
            for worker, ranks in zip(command.workers, assignments, strict=True):
                self._processes[worker.number].answer(ranks)
        elif isinstance(command, Notice):
            say(command.message)
        else:
            self._finish = command

    def _run_to_exit(
        self, worker: Worker, process: _WorkerProcess, variables: Mapping[str, str]
    ) -> None:
        try:
            exit_code = self._run_worker(worker, variables, process.end)
        except OSError as error:
            say(f"worker {worker} cannot be started: {error}")
            exit_code = 1
        with self._lock:
            code = worker.meant_exit_code(exit_code)
            is_reported = worker.exit_report is not None and worker.exit_report.error
            if code not in (0, *COMMITTED) and not (
                is_reported or process.end.is_set() or self._finish
            ):
                how = " (a signal has killed it, or its ssh has failed)" if code == _OF_SSH else ""
                say(f"worker {worker} {cause.in_words(code)}{how}")
                if ssh.is_here(worker.host) and (killed := cause.killed_for_memory()):
                    say(killed)
            self._processes.pop(worker.number).answer()
            self._roster.worker_exited(worker.number, exit_code, time.monotonic())
        self._news.set()

    def _environment_of(self, worker: Worker) -> dict[str, str]:
        slot = (worker.host, worker.slot)
        predecessor, self._last_in_slot[slot] = self._last_in_slot.get(slot), worker.number
        variables = {
            **_BEFORE_ITS_FIRST_RANK,
            JOB: self._name,
            WORKER: str(worker.number),
            SLOT: str(worker.slot),
            RUN_DIR: self.run_dir,
            "HOROVOD_HOSTNAME": worker.host,
            "HOROVOD_LOCAL_SIZE": str(self._roster.hosts[worker.host]),
        }
        if predecessor is not None:
            variables[REPLACES] = str(predecessor)
        return variables
