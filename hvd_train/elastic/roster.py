"""The workers of an elastic job and when they form a new world: events go in, commands come out.

The driver reports events (hosts found, a worker that asks for a rank, a heartbeat, a worker's exit)
and asks for commands: start a worker, end one, form a world of these workers, finish the job. A
slot has at most one worker.

- A slot without a worker gets one. If workers fail to start there, the wait before the next attempt
  grows.
- A worker that gets a signal leaves after the next step. Its slot stays empty for minutes, unless
  the list changes for its host. If all members get a signal, they commit and the job ends.
- A new worker imports and builds while the others train. When it asks for a rank, the members leave
  their world after the next step, and all workers that ask form the next world. Survivors come
  first and keep their order.
- After a fault the next world forms when every survivor has asked for a rank. A member that is
  silent, or does not ask in time, is evicted.
- If ranks cannot connect to newcomers, the next world forms without them, and their hosts stay
  unused until the list changes for them. If survivors alone cannot connect three times in a row,
  the job ends: who waits for a rank commits.
- An error that repeats at one step, or in one worker after another before the first step, ends the
  job: its cause is not in the cluster. A death by a signal and a lost host do not count.
- A worker whose training has ended says so. It keeps its slot until its process ends, however long
  that takes. No other worker waits for it, none starts any more, and no signal that ends its
  process undoes that it is done.
- The job finishes when no member is left and rank 0 was done or a member committed, when a worker
  exits with a code that holds for the whole job, or when there were too few workers for too long.
  If all members die otherwise, new workers form a world and resume from the last commit.

Pure: time is an argument, in seconds on any clock. After a jump all time limits start again.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hvd_train.launch.exit_report import During, ExitReport
from hvd_train.launch.workers import Request

# Exit codes of a worker that end the whole job. UNRECOVERABLE: a fault repeats, the loss stays not
# finite, the store of the data fails, the final files could not be written. COMMITTED: a commit
# before the end of the training.
WRONG_SETTINGS = 2
FAULT_REPEATS = 5
DIFFERS = 4  # the ranks' weights: the job resumes once
UNRECOVERABLE = (FAULT_REPEATS, 6, 7, 74)
STOPPED = (129, 130, 138, 143)  # by a signal to the worker
NO_DRIVER = 75
COMMITTED = (NO_DRIVER, *STOPPED)

SAME_ERRORS = 3  # an error that repeats this often, in any worker, ends the job
# samples may be read one step ahead, so one damaged image can end workers in neighbouring steps
NEAR_STEPS = 1
# the place of an error before the first rank, in place of the number of finished steps
BUILDING = -10

FIRST_NUMBER = 1000  # of a worker
SILENT_S = 10.0  # a worker sends a heartbeat every second; a longer silence counts as its death
SILENT_WHILE_REJOINING_S = 3.0  # the same while the other members wait for it
# from the first survivor that asks for a rank to the last; Gloo waits 30 s for lost packets
REPORT_S = 40.0
BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 60.0
# a slot whose worker got a signal stays empty: spot hosts go within two minutes
EMPTY_AFTER_SIGNAL_S = 300.0
STEADY_S = 60.0  # a worker that lived for this long did not fail to start
# a driver that asked for no commands for this long was paused, perhaps with all workers
PAUSED_S = 2.0
LEAVE_S = 10.0  # from a worker's exit report to its end
ATTEMPTS = 3  # of survivors to connect to each other
NOTICE_S = 30.0  # before the job says what it waits for, and between two such lines
TOO_FEW_WORKERS = 69  # the job's exit code: EX_UNAVAILABLE
_NONE = -1  # in place of the exit code of a worker that runs, or that was evicted
_UNLISTED = "its host is no longer listed"
_SIGNAL = (
    "it got a signal; its slot stays empty for 5 minutes, unless the list changes for its host"
)


class Stage(Enum):
    """The stage of a worker, as far as the roster knows."""

    STARTING = "starting"
    READY = "ready"  # it has built the model and waits for its first rank
    TRAINING = "training"
    REJOINING = "rejoining"  # it has left its world and waits for a rank in the next one
    LEAVING = "leaving"  # it has reported the error that ends it
    ENDING = "ending"  # it is evicted


@dataclass(eq=False)
class Worker:
    """One process in a slot of a host; its number is unique in the job."""

    number: int
    host: str
    slot: int
    started_at: float
    last_heartbeat: float  # or request
    stage: Stage = Stage.STARTING
    got_signal: bool = False
    # the members of its last world; the others may have formed another one since
    world: tuple[Worker, ...] = ()
    # whether it has connected to other ranks and synchronized the state with them
    connected: bool = False
    exit_report: ExitReport | None = None
    reported_at: float = 0.0  # when that came
    exit_code: int = _NONE

    def __str__(self) -> str:
        return f"{self.host}[{self.slot}]"

    @property
    def during(self) -> During | None:
        """When the error or end of its exit report came, if it has sent one."""
        return self.exit_report.during if self.exit_report else None

    @property
    def has_ended(self) -> bool:
        """Whether its training has ended, though its process may still run code of the user."""
        return self.during == "ended"

    def meant_exit_code(self, exit_code: int) -> int:
        """Return the exit report's code if a signal or an error ended it, else `exit_code`."""
        report = self.exit_report
        # of ssh, or a library that crashed in an exit handler
        is_useless = exit_code < 0 or exit_code >= 128
        return report.exit_code if report and (report.error or is_useless) else exit_code


_ON_THE_WAY_OUT = (Stage.LEAVING, Stage.ENDING)


@dataclass(frozen=True)
class Start:
    """Start this worker."""

    worker: Worker


@dataclass(frozen=True)
class End:
    """End this worker, if it still runs."""

    worker: Worker
    reason: str  # empty if the job is over
    kill: bool = False  # it cannot leave by itself


@dataclass(frozen=True)
class FormWorld:
    """Make these workers, in the order of their ranks, the new world."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class Notice:
    """Print this line."""

    message: str


@dataclass(frozen=True)
class Finish:
    """Finish the job with this exit code."""

    exit_code: int
    reason: str


Command = Start | End | FormWorld | Notice | Finish


def _place_of_error(worker: Worker, *, others_train: bool) -> int | None:
    """Return the place of a worker's error, or None if only this worker may have it."""
    if not worker.world:
        return None if others_train else BUILDING
    is_of_newcomer = (
        worker.during == "rendezvous"
        and not worker.connected
        and any(other.connected for other in worker.world)
    )
    return None if worker.exit_report is None or is_of_newcomer else worker.exit_report.step


@dataclass
class _SlotRecord:
    back_off_s: float = 0.0  # the wait after the last exit; grows while workers fail to start
    not_before: float = 0.0  # when the next worker may start


@dataclass
class Roster:
    """The workers of a job: methods take events, and `commands` returns commands."""

    start_workers: int  # the first world waits for them
    min_workers: int
    max_workers: int
    patience_s: float  # how long there may be fewer than `min_workers` workers before the job ends
    start_patience_s: float = 60.0  # how long the first world waits for more than `min_workers`
    hosts: dict[str, int] = field(default_factory=dict)  # the slots of each host that may be used
    # the members of the last world in the order of ranks, also after their exit
    world: tuple[Worker, ...] = ()
    worlds_formed: int = 0
    _workers: dict[int, Worker] = field(default_factory=dict)  # that have not exited, by number
    _exited: dict[int, Worker] = field(default_factory=dict)
    _slots: dict[tuple[str, int], _SlotRecord] = field(
        default_factory=lambda: defaultdict(_SlotRecord)
    )
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_NUMBER))
    # why workers could not synchronize in the last world
    _connect_errors: dict[int, str] = field(default_factory=dict)
    # how many worlds in a row could not connect though no member had died
    _failed_attempts: int = 0
    _judged: int = 0  # the number of worlds formed at the last `_after_rendezvous`
    _errors: int = 0  # how many workers in a row an error has ended at about one place
    _error_place: int = BUILDING
    _error_code: int = FAULT_REPEATS  # the exit code of the job if the errors end it
    # the last world whose ranks held different weights, or computed differently
    _differing: tuple[Worker, ...] = ()
    _notices: list[Notice] = field(default_factory=list)
    _fault_step: int = 0  # the steps before the last fault
    _asked_at: float = math.inf  # when the driver last asked for commands
    _rejoining_since: float = math.inf
    _short_since: float | None = None
    _noticed_at: float = 0.0
    # when there last were `min_workers` workers that wait for a world, or build and report
    _hopeful_at: float = 0.0
    _finish: Finish | None = None

    def hosts_found(self, hosts: Mapping[str, int]) -> None:
        """Note the slots of each host now; a changed host gets a clean record."""
        for host, slot in list(self._slots):
            if hosts.get(host) != self.hosts.get(host):
                del self._slots[host, slot]
        self.hosts = dict(hosts)

    def rank_requested(self, number: int, now: float) -> None:
        """Note that a worker is ready, or has left its world, and waits for a rank."""
        worker = self.worker(number)
        if worker is None or worker.stage is Stage.ENDING:
            return
        worker.last_heartbeat = now
        if worker.stage is Stage.STARTING:
            worker.stage = Stage.READY
        elif worker.stage is Stage.TRAINING:
            worker.stage = Stage.REJOINING
            self._rejoining_since = min(self._rejoining_since, now)

    def world_left(self, number: int, step: int, connect_error: str) -> None:
        """Note the finished steps of a worker that leaves its world, and why it could not connect
        to that world, or synchronize with it; empty if it could.
        """
        self._fault_step = step
        if connect_error and number in self._workers:
            self._connect_errors[number] = connect_error

    def exit_report_received(self, number: int, report: ExitReport | None, now: float) -> None:
        """Note the exit report of a worker, or withdraw it (None: its program trains again).

        After an error the others do not wait for its process.
        """
        if (worker := self.worker(number)) is not None:
            worker.exit_report = report
            worker.reported_at = now
            if report is not None and report.error and worker.stage is not Stage.ENDING:
                worker.stage = Stage.LEAVING

    def heartbeat_received(self, number: int, now: float) -> None:
        """Note that a worker is alive."""
        if (worker := self.worker(number)) is not None:
            worker.last_heartbeat = now

    def signal_received(self, number: int, now: float) -> None:
        """Note that a worker got a signal, which may have ended its ssh before."""
        worker = self.worker(number) or self._exited.get(number)
        if worker is not None and not worker.got_signal:
            worker.got_signal = True
            self._keep_empty(worker, now + EMPTY_AFTER_SIGNAL_S)

    def worker_exited(self, number: int, exit_code: int, now: float) -> None:
        """Note that a worker's process has ended."""
        worker = self._workers.pop(number, None)
        if worker is None:
            return
        self._exited[number] = worker
        exit_code = worker.meant_exit_code(exit_code)
        is_evicted = worker.stage is Stage.ENDING
        is_done = worker.has_ended and exit_code == 0
        if worker.got_signal or is_done or not is_evicted:
            worker.exit_code = exit_code
        slot = self._slots[worker.host, worker.slot]
        is_steady = now - worker.started_at >= STEADY_S
        longer_s = min(2 * slot.back_off_s, LONGEST_BACK_OFF_S)
        slot.back_off_s = BACK_OFF_S if is_steady else max(BACK_OFF_S, longer_s)
        leaves = exit_code in STOPPED and not is_evicted
        self._keep_empty(worker, now + (EMPTY_AFTER_SIGNAL_S if leaves else slot.back_off_s))
        # no other worker could start, or continue as rank 0
        is_same_for_all = not self.worlds_formed or (
            worker.during == "rendezvous" and worker in worker.world[:1]
        )
        if exit_code == DIFFERS:
            self._ended_by_difference(worker)
        elif exit_code in UNRECOVERABLE or (exit_code == WRONG_SETTINGS and is_same_for_all):
            self._finish = Finish(exit_code, f"{worker} ended with exit code {exit_code}")
        elif exit_code in (1, WRONG_SETTINGS):
            others_train = any(self._is_member(each) for each in self.world)
            place = _place_of_error(worker, others_train=others_train)
            if place is not None:
                self._count_error(place, WRONG_SETTINGS if exit_code != 1 else FAULT_REPEATS)

    def _ended_by_difference(self, worker: Worker) -> None:
        """Let new workers resume from the last commit, once in a job, and not on a host that
        computes wrongly; end the job if it cannot do without that host.
        """
        if worker.exit_report is not None and worker.exit_report.avoids_host:
            self._leave_unused(worker.host)
            usable = [each for each in self._listed() if self._slots[each].not_before < math.inf]
            if len(usable) < self.min_workers:
                self._finish = Finish(DIFFERS, f"{worker} differed from the others (see above)")
            self._notices.append(
                Notice(
                    f"{worker.host} is not used any more, unless the list changes for it: {worker} "
                    "differed from the others"
                )
            )
        elif self._differing not in ((), worker.world):
            self._finish = Finish(DIFFERS, "ranks differed again (see above)")
        else:
            self._differing = worker.world

    def commands(self, now: float) -> list[Command]:
        """Return what to do now; the roster takes it as done."""
        self._finish = self._finish or self._end_of_world() or self._error_that_repeats()
        commands = list[Command]()
        if self._finish is None:
            commands += self._next_commands(now)
        if self._finish is not None:
            others = self._in(*Stage)
            commands += [self._end(each, "") for each in others if each.stage is not Stage.ENDING]
            commands.append(self._finish)
        return commands

    def _next_commands(self, now: float) -> Iterator[Command]:
        """Yield what to do while the job is not over."""
        yield from self._notices
        self._notices.clear()
        yield from self._after_pause(now)
        yield from self._end_unresponsive(now)
        for worker in self._in(Stage.STARTING, Stage.READY):
            if not self._is_listed(worker):  # members leave together with the others
                yield self._end(worker, _UNLISTED)
        for worker in self._in(Stage.REJOINING):
            if worker.got_signal:
                yield self._end(worker, _SIGNAL)
        yield from self._start_missing(now)
        yield from self._form_world(now)

    def requested(self) -> Request:
        """Return what members should do after the next step: stop if all got a signal,
        or change to another world.
        """
        members = self._members()
        if members and all(worker.got_signal for worker in members):
            return "stop"
        if not members or any(worker.stage is not Stage.TRAINING for worker in members):
            return "train"
        staying = [worker for worker in members if self._is_listed(worker)]
        ready = self._ready()
        is_enough = len(staying) + len(ready) >= self.min_workers
        is_other = is_enough and (len(staying) < len(members) or bool(ready))
        return "change" if is_other or any(worker.got_signal for worker in members) else "train"

    def worker(self, number: int) -> Worker | None:
        """Return the worker with this number, or None if it has exited."""
        return self._workers.get(number)

    def _in(self, *stages: Stage) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.stage in stages]

    def _is_member(self, worker: Worker) -> bool:
        return worker.number in self._workers and worker.stage not in _ON_THE_WAY_OUT

    def _members(self) -> list[Worker]:
        return [worker for worker in self.world if self._is_member(worker)]

    def _count_error(self, place: int, exit_code: int) -> None:
        """Count an error; the job ends with `exit_code` if it is the last one of
        several at about the same place.
        """
        if abs(place - self._error_place) > NEAR_STEPS:
            self._errors = 0
            self._error_place = place
        self._errors += 1
        self._error_code = exit_code

    def _keep_empty(self, worker: Worker, until: float) -> None:
        record = self._slots[worker.host, worker.slot]
        record.not_before = max(record.not_before, until)

    def _leave_unused(self, host: str) -> None:
        """Start no worker on a host until the list changes for it."""
        for slot in range(self.hosts.get(host, 0)):
            self._slots[host, slot].not_before = math.inf

    def _listed(self) -> list[tuple[str, int]]:
        """Return the host and number of each slot."""
        return [(host, slot) for host, slots in self.hosts.items() for slot in range(slots)]

    def _ready(self) -> list[Worker]:
        """Return the workers that may join the next world."""
        return [worker for worker in self._in(Stage.READY) if self._is_listed(worker)]

    def _is_listed(self, worker: Worker) -> bool:
        return worker.slot < self.hosts.get(worker.host, 0)

    def _end(self, worker: Worker, reason: str, *, kill: bool = False) -> End:
        worker.stage = Stage.ENDING
        return End(worker, reason, kill)

    def _after_pause(self, now: float) -> Iterator[Notice]:
        """Restart the time limits after a pause of the driver, which
        the workers may have shared.
        """
        paused_s = now - self._asked_at
        self._asked_at = now
        if paused_s > PAUSED_S:
            self._hopeful_at = now
            self._rejoining_since = max(now, self._rejoining_since)
            for worker in self._workers.values():
                worker.last_heartbeat = now
            yield Notice(f"the driver was paused for {paused_s:.0f} s: all time limits start again")

    def _end_unresponsive(self, now: float) -> Iterator[End]:
        """End workers without a heartbeat, and workers that keep the others waiting for too long.

        Members that do not come though their hosts are there hang in a step: together they count
        as one error.
        """
        for worker in self._in(Stage.LEAVING):
            if now - worker.reported_at > LEAVE_S:
                yield self._end(worker, f"it has not ended within {LEAVE_S:.0f} s", kill=True)
        hangs = False
        for worker in self._in(Stage.TRAINING, Stage.READY, Stage.REJOINING):
            is_due = worker.stage is Stage.TRAINING and not worker.has_ended
            missed_s = now - self._rejoining_since if is_due else -math.inf
            silent_s = now - worker.last_heartbeat
            if silent_s > (SILENT_WHILE_REJOINING_S if missed_s >= 0 else SILENT_S):
                yield self._end(worker, f"no heartbeat for {silent_s:.0f} s", kill=True)
            elif missed_s > REPORT_S:
                reason = f"it has not come to the new world within {REPORT_S:.0f} s"
                yield self._end(worker, reason, kill=True)
                hangs = True
        if hangs:
            self._count_error(self._fault_step, FAULT_REPEATS)

    def _start_missing(self, now: float) -> Iterator[Start]:
        workers = self._in(*Stage)
        if any(worker.has_ended for worker in workers):
            return
        taken = {(worker.host, worker.slot) for worker in workers}
        free = [
            slot
            for slot in self._listed()
            if slot not in taken and self._slots[slot].not_before <= now
        ]
        room = self.max_workers - sum(worker.stage not in _ON_THE_WAY_OUT for worker in workers)
        for host, slot in free[: max(room, 0)]:
            number = next(self._numbers)
            self._workers[number] = Worker(number, host, slot, started_at=now, last_heartbeat=now)
            yield Start(self._workers[number])

    def _form_world(self, now: float) -> Iterator[Command]:
        """Form a new world when every survivor waits for it and workers are enough."""
        members = [worker for worker in self._members() if not worker.has_ended]
        if any(worker.stage is Stage.TRAINING for worker in members):
            return
        if not members and any(worker.has_ended for worker in self._workers.values()):
            return
        if self._judged < self.worlds_formed:
            self._judged = self.worlds_formed
            yield from self._judge_connections(members)
        if self._finish is not None:
            return
        members = [worker for worker in members if self._is_member(worker)]
        survivors = [worker for worker in members if self._is_listed(worker)] or members
        chosen = survivors + self._ready()  # not more than `max_workers`: no more were started
        if not self._is_enough(len(chosen), now):
            if now - self._hopeful_at > self.patience_s:
                reason = f"fewer than {self.min_workers} workers for {self.patience_s:.0f} s"
                self._finish = Finish(TOO_FEW_WORKERS, reason)
            if now - self._noticed_at >= NOTICE_S:
                self._noticed_at = now
                yield self._notice_of_waiting(len(chosen))
            return
        for worker in members:
            if worker not in chosen:
                yield self._end(worker, _UNLISTED)
        self.world = tuple(chosen)
        self._rejoining_since = math.inf
        self._short_since = None
        for worker in chosen:
            worker.stage = Stage.TRAINING
            worker.world = self.world
        self.worlds_formed += 1
        if self._error_place == BUILDING:
            self._errors = 0
        yield FormWorld(self.world)

    def _judge_connections(self, members: Sequence[Worker]) -> Iterator[Command]:
        """Note whether the last world connected, by what its members report who are left.

        If not, leave out its newcomers, or count the attempt of survivors, of which the last one
        ends the job.
        """
        reasons = self._connect_errors
        self._connect_errors = {}
        if not all(worker.number in reasons for worker in members):
            self._failed_attempts = 0
            for worker in members:
                worker.connected = True
        elif members and len(members) == len(self.world):  # else a death explains the failure
            newcomers = [worker for worker in members if not worker.connected]
            if 0 < len(newcomers) < len(members):
                yield from self._leave_out(newcomers, reasons[newcomers[0].number])
            else:
                yield self._count_failed_attempt(members, reasons[members[0].number])

    def _count_failed_attempt(self, members: Sequence[Worker], reason: str) -> Notice:
        self._failed_attempts += 1
        slots = Counter(worker.host for worker in members)
        hosts = ",".join(f"{host}:{count}" for host, count in slots.items())
        failure = "ranks could not connect to each other"
        if self._failed_attempts == ATTEMPTS:
            advice = f"`hvd-train doctor -H {hosts}` examines them"
            self._finish = Finish(FAULT_REPEATS, f"{failure} {ATTEMPTS} times in a row; {advice}")
        attempt = f"attempt {self._failed_attempts} of {ATTEMPTS}, on {hosts}"
        return Notice(f"{failure} ({attempt}): {reason}")

    def _leave_out(self, newcomers: Sequence[Worker], reason: str) -> Iterator[Command]:
        """End newcomers and the others of their hosts, where no slot is used until the list
        changes.
        """
        hosts = {worker.host for worker in newcomers}
        for host in hosts:
            self._leave_unused(host)
        failure = f"ranks could not connect to the newcomers on {', '.join(sorted(hosts))}"
        cure = "no worker is started there until the list changes for these hosts"
        yield Notice(f"{failure} ({reason}); {cure}")
        for worker in self._in(Stage.STARTING, Stage.READY, Stage.REJOINING):
            if worker.host in hosts and not worker.connected:
                yield self._end(worker, "the other ranks could not connect to it")

    def _is_enough(self, count: int, now: float) -> bool:
        """Return whether a world may form."""
        if self._short_since is None:
            self._short_since = self._noticed_at = self._hopeful_at = now
        reporting = [
            worker
            for worker in self._in(Stage.STARTING)
            if worker.last_heartbeat > worker.started_at
        ]
        building = [worker for worker in reporting if now - worker.last_heartbeat <= SILENT_S]
        if count + len(building) >= self.min_workers:
            self._hopeful_at = now
        is_late = self.worlds_formed > 0 or now - self._short_since > self.start_patience_s
        return count >= (self.min_workers if is_late else self.start_workers)

    def _notice_of_waiting(self, ready: int) -> Notice:
        starting = len(self._in(Stage.STARTING))
        slots = sum(self.hosts.values())
        wanted = self.min_workers if self.worlds_formed else self.start_workers
        line = f"waiting for workers: {ready} of {wanted} ready, {starting} starting"
        return Notice(f"{line}, {slots} slots listed")

    def _error_that_repeats(self) -> Finish | None:
        place = f"in step {self._error_place + 1}"
        if self._error_place == BUILDING:
            place = "before the ranks connected"
            hopeful = [
                worker
                for worker in self._in(Stage.STARTING)
                if not self._slots[worker.host, worker.slot].back_off_s
            ]
            if hopeful or self._in(Stage.READY):
                return None
        reason = f"{self._errors} workers in a row ended with an error {place} (see above)"
        return Finish(self._error_code, reason) if self._errors >= SAME_ERRORS else None

    def _end_of_world(self) -> Finish | None:
        """Return how the job finishes, or None while there are members
        or if new workers continue.
        """
        if not self.world or self._in(Stage.TRAINING, Stage.REJOINING):
            return None
        # Members that got a signal count only if all members got one.
        asked = [worker for worker in self.world if not worker.got_signal] or self.world
        committed = [worker.exit_code for worker in asked if worker.exit_code in COMMITTED]
        if committed:
            return Finish(committed[0], "stopped, and committed")
        return Finish(0, "done") if asked[0].exit_code == 0 else None
