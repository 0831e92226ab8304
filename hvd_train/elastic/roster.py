"""Which workers an elastic job has and when they form a new world: events go in, commands come out.

A job is a list of hosts with slots, at most one worker per slot, and one world after another. The driver reports what
happens (hosts found, a worker that asks for a rank, a heartbeat, a worker's exit) and asks for commands: start a
worker, end one, form a world of these workers, finish the job.

- A slot without a worker gets one; where workers fail to start, the next attempt waits longer and longer.
- A worker that was told to end by a signal leaves after the next step, and the others go on without it, or wait for
  others where they are too few. Its host is about to go, so its slot stays empty for minutes, unless the host is listed
  anew. Where all members were told, they commit and the job ends.
- A new worker imports and builds while the others train. Once it asks for a rank, the members are told to leave their
  world after the next step, and all that ask form the next world. Survivors come first and keep their order.
- After a fault the survivors ask for a rank. The next world forms as soon as every survivor has asked; a member that is
  silent, or does not ask in time, is ended and left out.
- Ranks that cannot meet try again. Where that fails again and again though all of them live, the newcomers are left
  out, and tried again later, one at a time.
- An error that comes back at the same step, or in one worker after another before the first step, ends the job: it is
  not in the cluster. A death by a signal is, and so is a lost host.
- The job finishes when no member of a world is left and rank 0 was done or a member committed, when a worker exits
  with a code that holds for the whole job, or when there were too few workers for too long. Where all members of a
  world die otherwise, new workers form another one and go on from the last commit.

Nothing here knows of processes, networks or threads, and time is an argument (seconds on any clock that does not jump),
so a test can play any history.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hvd_train.elastic import back_off
from hvd_train.elastic.failed_meetings import LEFT_OUT_S, LONGEST_LEFT_OUT_S, FailedMeetings
from hvd_train.elastic.repeated_errors import ErrorsInARow, place_of_error
from hvd_train.elastic.waiting import Wait
from hvd_train.elastic.worker import COMMITTED, NO_TIME_LEFT, STOPPED, UNRECOVERABLE, WRONG_SETTINGS, Stage, Worker
from hvd_train.launch.last_word import LastWord

SILENT_S = 10.0  # a worker sends a heartbeat every second: after so long without one it is taken for dead
SILENT_WHILE_MEETING_S = 3.0  # the others miss a member: whoever is silent at that moment is the one
REPORT_S = 20.0  # from the first survivor that asks for a rank to the last
BACK_OFF_S, LONGEST_BACK_OFF_S = 1.0, 60.0
TOLD_TO_END_S = 300.0  # a slot whose worker was told to end stays empty: spot hosts go within two minutes
STEADY_S = 60.0  # a worker that was in worlds for so long did not fail to start
DESERTED_S = 60.0  # workers that stop so soon after a pause of the driver do so since it did not answer
LEAVE_S = 10.0  # from a worker's last word to its end
TOO_FEW_WORKERS = 69  # the job's exit code: EX_UNAVAILABLE
_ENDED_BY_COMMAND = -1  # in place of the exit code, which says nothing about a worker that was told to end
_ON_THE_WAY_OUT = (Stage.LEAVING, Stage.ENDING)


@dataclass(frozen=True)
class Start:
    """Start this worker."""

    worker: Worker


@dataclass(frozen=True)
class End:
    """End this worker, if it still runs."""

    worker: Worker
    reason: str
    unresponsive: bool = False
    """Whether the worker no longer reacts, so that waiting for it to leave would be in vain."""


@dataclass(frozen=True)
class FormWorld:
    """Make these workers, in the order of their ranks, the new world."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class Tell:
    """Tell the user."""

    message: str


@dataclass(frozen=True)
class Finish:
    """Finish the job with this exit code."""

    exit_code: int
    reason: str


Command = Start | End | FormWorld | Tell | Finish


@dataclass
class _SlotRecord:
    """How often in a row workers of one slot have failed to start, and when the next one may be started."""

    failures: int = 0
    not_before: float = 0.0
    left_out: int = 0
    """How often its worker was left out since the others could not meet with it."""


@dataclass
class Roster:
    """The workers of a job: methods take the events, and `commands` returns what to do about them."""

    start_workers: int
    """Workers that the first world waits for."""
    min_workers: int
    max_workers: int
    patience_s: float
    """How long there may be fewer than `min_workers` workers before the job is given up."""
    start_patience_s: float = 60.0
    """How long the first world waits for `start_workers` workers when `min_workers` are there."""
    hosts: dict[str, int] = field(default_factory=dict)
    """The number of slots of each host that may be used."""
    world: tuple[Worker, ...] = ()
    """The members of the last world in the order of their ranks, including those that have exited since."""
    worlds_formed: int = 0
    paused_at: float = -DESERTED_S
    """When the driver was paused last. Workers that ran on may have stopped since it did not answer."""
    _workers: list[Worker] = field(default_factory=list)
    _slots: dict[tuple[str, int], _SlotRecord] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1000))
    _exit_codes: dict[Worker, int] = field(default_factory=dict)
    _not_met: dict[int, str] = field(default_factory=dict)
    """Why they had to leave the last world before its ranks had met, by the numbers of these workers."""
    _failed_meetings: FailedMeetings = field(default_factory=FailedMeetings)
    _errors: ErrorsInARow = field(default_factory=ErrorsInARow)
    _meeting_since: float | None = None
    _short_since: float | None = None
    _wait_told_at: float | None = None
    _hopeful_at: float = 0.0
    """When there last were `min_workers` workers that wait for a world, or build and report."""
    _finish: Finish | None = None

    # ------------------------------------------------------------------------------------------------ events

    def hosts_found(self, hosts: Mapping[str, int]) -> None:
        """Note the hosts that may be used now, with their slots; a host that comes back starts with a clean record."""
        for host in hosts:
            if host not in self.hosts:
                for slot in [slot for slot in self._slots if slot[0] == host]:
                    del self._slots[slot]
        self.hosts = dict(hosts)

    def rank_requested(self, number: int, now: float) -> None:
        """Note that a worker is ready, or has left its world, and waits for a rank."""
        worker = self.worker(number)
        if worker is None or worker.stage is Stage.ENDING:
            return
        worker.heard_at = now
        if worker.stage is Stage.STARTING:
            worker.stage = Stage.READY
        elif worker.stage is Stage.TRAINING:
            worker.stage = Stage.MEETING
            if self._meeting_since is None:
                self._meeting_since = now

    def not_met(self, number: int, why: str) -> None:
        """Note that a worker leaves a world whose ranks have not come to one state; it asks for its next rank then."""
        if self.worker(number) is not None:
            self._not_met[number] = why

    def last_word_received(self, number: int, word: LastWord, now: float) -> None:
        """Note how a worker ends. After an error the others need not wait for the end of its process."""
        worker = self.worker(number)
        if worker is None:
            return
        worker.last_word, worker.said_at = word, now
        if word.error and worker.stage is not Stage.ENDING:
            worker.stage = Stage.LEAVING

    def heartbeat_received(self, number: int, now: float) -> None:
        """Note that a worker is alive."""
        if (worker := self.worker(number)) is not None:
            worker.heard_at = now

    def told_to_end(self, number: int) -> None:
        """Note that a signal has told a worker to end."""
        if (worker := self.worker(number)) is not None:
            worker.told_to_end = True

    def worker_exited(self, number: int, exit_code: int, now: float) -> None:
        """Note that a worker's process has ended."""
        worker = self.worker(number)
        if worker is None:
            return
        self._workers.remove(worker)
        exit_code = worker.meant_exit_code(exit_code)
        is_ending = worker.stage is Stage.ENDING
        is_deserted = exit_code == NO_TIME_LEFT and now - self.paused_at < DESERTED_S
        means_nothing = is_deserted or (is_ending and not worker.told_to_end)
        self._exit_codes[worker] = _ENDED_BY_COMMAND if means_nothing else exit_code
        slot = self._record(worker)
        steady = worker.joined_at is not None and now - worker.joined_at >= STEADY_S
        slot.failures = 1 if steady else slot.failures + 1
        back_off_s = back_off.wait_s(BACK_OFF_S, LONGEST_BACK_OFF_S, slot.failures - 1)
        if worker.told_to_end or (exit_code in STOPPED and not is_ending):
            back_off_s = TOLD_TO_END_S
        slot.not_before = max(slot.not_before, now + back_off_s)
        if exit_code in UNRECOVERABLE:
            self._finish = Finish(exit_code, f"{worker} ended with exit code {exit_code}")
        elif exit_code == WRONG_SETTINGS and not self.worlds_formed:
            self._finish = Finish(exit_code, f"{worker} cannot start")
        elif exit_code == WRONG_SETTINGS and worker.failed_to_meet and worker in worker.world[:1]:
            self._finish = Finish(exit_code, f"{worker}, as rank 0, cannot go on")  # and no other could
        elif exit_code in (1, WRONG_SETTINGS):
            place = place_of_error(worker, others_train=bool(self._members()))
            if place is not None:
                self._errors = self._errors.and_another(place, worker)
        if self._finish is None and worker in self.world and not self._members():
            self._finish = self._end_of_world()

    # ------------------------------------------------------------------------------------- what to do about them

    def commands(self, now: float) -> list[Command]:
        """Return what to do now; the roster takes it as done."""
        self._finish = self._finish or self._error_that_repeats(now)
        if self._finish is not None:
            return [*self._end_all("the job is over"), self._finish]
        ended = [*self._end_unresponsive(now), *self._end_unlisted_newcomers(), *self._end_those_told_to()]
        return [*ended, *self._start_missing(now), *self._form_world(now)]

    def wants_change(self) -> bool:
        """Return whether members should leave their world after the next step: one is ready to join, or one must go."""
        members = self._members()
        if not members or any(worker.stage is not Stage.TRAINING for worker in members):
            return False
        if any(worker.told_to_end for worker in members):
            return True
        staying = [worker for worker in members if self._is_listed(worker)]
        ready = [worker for worker in self._in(Stage.READY) if self._is_listed(worker)]
        if len(staying) + len(ready) < self.min_workers:
            return False
        return len(staying) < len(members) or bool(ready)

    def wants_stop(self) -> bool:
        """Return whether members should commit and end the job: all of them were told to end."""
        members = self._members()
        return bool(members) and all(worker.told_to_end for worker in members)

    def world_is_broken(self) -> bool:
        """Return whether a member of the last world is gone."""
        return len(self._members()) < len(self.world)

    def worker(self, number: int) -> Worker | None:
        """Return the worker with this number, or None where it has exited."""
        return next((worker for worker in self._workers if worker.number == number), None)

    # ------------------------------------------------------------------------------------------------- inside

    def _in(self, *stages: Stage) -> list[Worker]:
        return [worker for worker in self._workers if worker.stage in stages]

    def _members(self) -> list[Worker]:
        """Return the members of the last world that still run, in the order of their ranks."""
        return [worker for worker in self.world if worker in self._workers and worker.stage not in _ON_THE_WAY_OUT]

    def _record(self, worker: Worker) -> _SlotRecord:
        return self._slots.setdefault((worker.host, worker.slot), _SlotRecord())

    def _is_listed(self, worker: Worker) -> bool:
        return worker.slot < self.hosts.get(worker.host, 0)

    def _end(self, worker: Worker, reason: str, *, unresponsive: bool = False) -> End:
        worker.stage = Stage.ENDING
        return End(worker, reason, unresponsive)

    def _end_all(self, reason: str) -> list[End]:
        return [self._end(worker, reason) for worker in self._workers if worker.stage is not Stage.ENDING]

    def _end_unresponsive(self, now: float) -> list[End]:
        """End workers without a heartbeat, and members that have one but do not come where the others wait for them."""
        commands = []
        for worker in self._in(Stage.LEAVING):
            if now - worker.said_at > LEAVE_S:
                commands.append(self._end(worker, f"it has not ended within {LEAVE_S:.0f} s", unresponsive=True))
        waited_s = None if self._meeting_since is None else now - self._meeting_since
        for worker in self._in(Stage.TRAINING, Stage.READY, Stage.MEETING):
            missed = waited_s is not None and worker.stage is Stage.TRAINING
            silent_s = now - worker.heard_at
            if silent_s > (SILENT_WHILE_MEETING_S if missed else SILENT_S):
                commands.append(self._end(worker, f"nothing was heard of it for {silent_s:.0f} s", unresponsive=True))
            elif missed and waited_s is not None and waited_s > REPORT_S:
                reason = f"it has not come to the new world within {REPORT_S:.0f} s"
                commands.append(self._end(worker, reason, unresponsive=True))
        return commands

    def _end_unlisted_newcomers(self) -> list[End]:
        """End newcomers whose host is no longer listed; members leave after the next step, together with the others."""
        unlisted = [worker for worker in self._in(Stage.STARTING, Stage.READY) if not self._is_listed(worker)]
        return [self._end(worker, "its host is no longer listed") for worker in unlisted]

    def _end_those_told_to(self) -> list[End]:
        """End members that were told to end and have left their world: they wait for no other one."""
        reason = "it was told to end by a signal, so its host may be about to go; no worker is started in its slot for "
        reason += f"{TOLD_TO_END_S / 60:.0f} minutes, unless the host is listed anew"
        return [self._end(worker, reason) for worker in self._in(Stage.MEETING) if worker.told_to_end]

    def _start_missing(self, now: float) -> list[Start]:
        commands = []
        taken = {(worker.host, worker.slot) for worker in self._workers}
        room = self.max_workers - len([worker for worker in self._workers if worker.stage not in _ON_THE_WAY_OUT])
        for host, num_slots in self.hosts.items():
            for slot in range(num_slots):
                record = self._slots.setdefault((host, slot), _SlotRecord())
                if room > 0 and (host, slot) not in taken and record.not_before <= now:
                    worker = Worker(next(self._numbers), host, slot, started_at=now, heard_at=now)
                    self._workers.append(worker)
                    commands.append(Start(worker))
                    room -= 1
        return commands

    def _form_world(self, now: float) -> list[Command]:
        """Form a new world as soon as every survivor of the last one waits for it and there are enough workers."""
        members = self._members()
        if any(worker.stage is Stage.TRAINING for worker in members):
            return []
        commands = self._after_a_failed_meeting(members, now)
        members = self._members()
        survivors = [worker for worker in members if self._is_listed(worker)] or members
        chosen = survivors + self._newcomers()  # not more than `max_workers`: no more were started
        if not self._is_enough(len(chosen), now):
            if now - self._hopeful_at > self.patience_s:
                self._finish = Finish(
                    TOO_FEW_WORKERS, f"fewer than {self.min_workers} workers for {self.patience_s:.0f} s"
                )
                return [*commands, *self._end_all(self._finish.reason), self._finish]
            return [*commands, *self._tell_of_the_wait(len(chosen), now)]
        dropped = [worker for worker in members if worker not in chosen]
        commands += [self._end(worker, "its host is no longer listed") for worker in dropped]
        self.world, self._meeting_since, self._short_since = tuple(chosen), None, None
        for worker in chosen:
            worker.stage, worker.world = Stage.TRAINING, self.world
            worker.joined_at = worker.joined_at or now
        self._wait_told_at = None
        self.worlds_formed += 1
        self._errors = self._errors.once_a_world_forms()
        return [*commands, FormWorld(self.world)]

    def _newcomers(self) -> list[Worker]:
        """Return the new workers that may join the next world; of those left out before, one at a time."""
        ready = [worker for worker in self._in(Stage.READY) if self._is_listed(worker)]
        clean = [worker for worker in ready if not self._record(worker).left_out]
        return clean or ready[:1]

    def _after_a_failed_meeting(self, members: list[Worker], now: float) -> list[Command]:
        """Take note of whether the ranks of the last world had met; after too many failures leave somebody out."""
        reasons, self._not_met = self._not_met, {}
        if not all(worker.number in reasons for worker in members):
            self._failed_meetings = FailedMeetings()
            for worker in members:
                worker.has_met = True
                self._record(worker).left_out = 0
            return []
        if not members or len(members) < len(self.world):
            return []  # it broke since a rank has died
        failed = self._failed_meetings.and_another()
        commands: list[Command] = [Tell(f"the ranks have not met{failed}: {reasons[members[0].number]}")]
        on_trial = [worker for worker in members if self._record(worker).left_out]
        left_out = failed.to_leave_out(members, on_trial)
        for worker in left_out:
            record = self._record(worker)
            seconds = back_off.wait_s(LEFT_OUT_S, LONGEST_LEFT_OUT_S, record.left_out)
            record.left_out += 1
            record.not_before = now + seconds
            reason = f"the ranks have not met with it{failed}; it is tried again in {seconds:.0f} s"
            commands.append(self._end(worker, reason))
        self._failed_meetings = failed.without_those() if left_out else failed
        return commands

    def _is_enough(self, count: int, now: float) -> bool:
        """Return whether a world may form."""
        building = [worker for worker in self._in(Stage.STARTING) if self._is_building(worker, now)]
        if count + len(building) >= self.min_workers:
            self._hopeful_at = now
        if self._short_since is None:
            self._short_since = self._hopeful_at = now
        waited_s = now - self._short_since
        if count >= self.start_workers:
            return True
        return count >= self.min_workers and (self.worlds_formed > 0 or waited_s > self.start_patience_s)

    def _tell_of_the_wait(self, ready: int, now: float) -> list[Command]:
        """Tell what the next world waits for, where that has taken a while and again from time to time."""
        assert self._short_since is not None
        waited_s = now - self._short_since
        wait = Wait(
            ready=ready,
            starting=len(self._in(Stage.STARTING)),
            slots=min(sum(self.hosts.values()), self.max_workers),
            wanted=self.min_workers if self.worlds_formed else self.start_workers,
            least=self.min_workers,
            is_first=self.worlds_formed == 0,
            starts_in_s=self.start_patience_s - waited_s,
            ends_in_s=self.patience_s - (now - self._hopeful_at),
        )
        told_s = None if self._wait_told_at is None else now - self._wait_told_at
        if not wait.is_due(waited_s, told_s):
            return []
        self._wait_told_at = now
        return [Tell(wait.describe())]

    def _is_building(self, worker: Worker, now: float) -> bool:
        """Return whether a worker has been heard of since it was started, and lately."""
        return worker.heard_at > worker.started_at and now - worker.heard_at <= SILENT_S

    def _error_that_repeats(self, now: float) -> Finish | None:
        """Return how the job finishes since an error comes back again and again, or None."""
        if not self._errors.is_long:
            return None
        if self._errors.place == "building" and (self._in(Stage.READY) or self._may_build(now)):
            return None
        return Finish(self._errors.exit_code, str(self._errors))

    def _may_build(self, now: float) -> bool:
        """Return whether a worker is starting in a slot where none has failed yet: it may get further than others."""
        return any(
            not self._record(worker).failures
            and (self._is_building(worker, now) or now - worker.started_at < self.start_patience_s)
            for worker in self._in(Stage.STARTING)
        )

    def _end_of_world(self) -> Finish | None:
        """Return how the job finishes now that no member is left, or None where new workers are to go on.

        A commit by any member ends the job; so does rank 0 with exit code 0. Members that a signal has told to leave
        speak for the job only where all were told.
        """
        asked = [worker for worker in self.world if not worker.told_to_end] or self.world
        # A member that was told to end may still be running.
        exit_codes = [self._exit_codes.get(worker, _ENDED_BY_COMMAND) for worker in asked]
        committed = [code for code in exit_codes if code in COMMITTED]
        if committed:
            return Finish(committed[0], "stopped, and committed")
        return Finish(0, "done") if exit_codes[0] == 0 else None
