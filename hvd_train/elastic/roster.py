"""Which workers an elastic job has and when they form a new world: told what happens, it says what to do.

Nothing here knows of processes, networks or threads, and time is an argument: any history can be played in a test.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

SILENT_S = 10.0  # a worker says every second that it lives: this long without a word, and it does not
SILENT_WHILE_MEETING_S = 3.0  # the others have found one to be gone: whoever is silent then is the one
REPORT_S = 20.0  # from the first survivor of a fault that asks for a new world to the last
BACK_OFF_S, LONGEST_BACK_OFF_S = 1.0, 60.0
STEADY_S = 60.0  # a worker that has lived so long has not failed to start

# How a worker ends where the job as a whole should end with it: wrong settings, replicas that differ, a step that
# breaks in every world, a loss that is not finite any more; and a commit on the way, by a signal or when its time
# was up.
WRONG_SETTINGS = 2
HOPELESS = (4, 5, 6)
COMMITTED = (75, 130, 138, 143)
_TOLD_TO = -1  # ended by an order: its exit code says nothing


class Stage(Enum):
    """What a worker is doing."""

    STARTING = "starting"
    READY = "ready"
    """It has built all it needs and waits for a rank."""
    TRAINING = "training"
    MEETING = "meeting"
    """It has left its world and waits for a rank in the next one."""
    ENDING = "ending"
    """It has been told to end."""


@dataclass(eq=False)
class Worker:
    """One process, with a number that no other one of the job has ever had, in a place of its host."""

    number: int
    host: str
    slot: int
    started: float
    heard: float
    stage: Stage = Stage.STARTING

    def __str__(self) -> str:
        return f"{self.host}[{self.slot}]"


@dataclass(frozen=True)
class Start:
    """Start this worker."""

    worker: Worker


@dataclass(frozen=True)
class End:
    """End this worker, if it still runs."""

    worker: Worker
    why: str
    at_once: bool = False
    """It does not react: there is nothing to wait for."""


@dataclass(frozen=True)
class Form:
    """These workers, in the order of their ranks, are the new world."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class Finish:
    """The job is over."""

    exit_code: int
    why: str


Order = Start | End | Form | Finish


@dataclass
class _Place:
    """A slot of a host."""

    failures: int = 0
    not_before: float = 0.0


@dataclass
class Roster:
    """The workers of a job. Each method takes what has happened; `orders` says what should be done about it."""

    first: int
    """Workers that the first world waits for."""
    fewest: int
    most: int
    patience_s: float
    """With fewer than `fewest` workers for so long the job is given up."""
    start_patience_s: float = 60.0
    """So long the first world waits for `first` workers where `fewest` are there."""
    hosts: dict[str, int] = field(default_factory=dict)
    world: tuple[Worker, ...] = ()
    """The members of the last world in the order of their ranks, those that have gone since included."""
    formed: int = 0
    _workers: list[Worker] = field(default_factory=list)
    _places: dict[tuple[str, int], _Place] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1000))
    _codes: dict[Worker, int] = field(default_factory=dict)
    _meeting_since: float | None = None
    _short_since: float | None = None
    _finish: Finish | None = None

    # ------------------------------------------------------------------------------------------- what happens

    def found(self, hosts: Mapping[str, int]) -> None:
        """These hosts, with so many slots each, may be used; a host that comes back starts with a clean record."""
        for host in hosts:
            if host not in self.hosts:
                for place in [place for place in self._places if place[0] == host]:
                    del self._places[place]
        self.hosts = dict(hosts)

    def asked(self, number: int, now: float) -> None:
        """A worker waits for a rank."""
        worker = self.worker(number)
        if worker is None or worker.stage is Stage.ENDING:
            return
        worker.heard = now
        if worker.stage is Stage.STARTING:
            worker.stage = Stage.READY
        elif worker.stage is Stage.TRAINING:
            worker.stage = Stage.MEETING
            if self._meeting_since is None:
                self._meeting_since = now

    def heard(self, number: int, now: float) -> None:
        """A worker has said that it lives."""
        if (worker := self.worker(number)) is not None:
            worker.heard = now

    def ended(self, number: int, code: int, now: float) -> None:
        """A worker's process has ended."""
        worker = self.worker(number)
        if worker is None:
            return
        self._workers.remove(worker)
        self._codes[worker] = _TOLD_TO if worker.stage is Stage.ENDING else code
        place = self._places.setdefault((worker.host, worker.slot), _Place())
        place.failures = 1 if now - worker.started >= STEADY_S else place.failures + 1
        place.not_before = now + min(BACK_OFF_S * 2 ** (place.failures - 1), LONGEST_BACK_OFF_S)
        if code in HOPELESS:
            self._finish = Finish(code, f"{worker} ended with exit code {code}")
        elif code == WRONG_SETTINGS and not self.formed:
            self._finish = Finish(code, f"{worker} cannot start")
        elif worker in self.world and not self._members():
            self._finish = self._end_of_world()

    # ---------------------------------------------------------------------------------------------- what to do

    def orders(self, now: float) -> list[Order]:
        """What should be done now; it is taken as done."""
        if self._finish is not None:
            return [*self._end_all("the job is over"), self._finish]
        orders: list[Order] = [*self._end_the_silent(now), *self._end_the_unwanted()]
        orders += self._start_missing(now)
        orders += self._form(now)
        return orders

    def wants_change(self) -> bool:
        """Whether the members should come together at the next step, because somebody came or should go."""
        members = self._members()
        if not members or any(worker.stage is not Stage.TRAINING for worker in members):
            return False
        staying = [worker for worker in members if self._has_place(worker)]
        ready = [worker for worker in self._in(Stage.READY) if self._has_place(worker)]
        room = self.most - len(staying)
        if len(staying) + min(room, len(ready)) < self.fewest:
            return False
        return len(staying) < len(members) or (bool(ready) and room > 0)

    def worker(self, number: int) -> Worker | None:
        """The worker of this number, if it still runs."""
        return next((worker for worker in self._workers if worker.number == number), None)

    # -------------------------------------------------------------------------------------------------- inside

    def _in(self, *stages: Stage) -> list[Worker]:
        return [worker for worker in self._workers if worker.stage in stages]

    def _members(self) -> list[Worker]:
        """Members of the last world that still run, in the order of their ranks."""
        return [worker for worker in self.world if worker in self._workers and worker.stage is not Stage.ENDING]

    def _has_place(self, worker: Worker) -> bool:
        return worker.slot < self.hosts.get(worker.host, 0)

    def _end(self, worker: Worker, why: str, *, at_once: bool = False) -> End:
        worker.stage = Stage.ENDING
        return End(worker, why, at_once)

    def _end_all(self, why: str) -> list[End]:
        return [self._end(worker, why) for worker in self._workers if worker.stage is not Stage.ENDING]

    def _end_the_silent(self, now: float) -> list[End]:
        """Who says nothing, and who says that it lives but does not come where the others wait for it."""
        orders = []
        waited = None if self._meeting_since is None else now - self._meeting_since
        for worker in self._in(Stage.TRAINING, Stage.READY, Stage.MEETING):
            missed = waited is not None and worker.stage is Stage.TRAINING
            silence = now - worker.heard
            if silence > (SILENT_WHILE_MEETING_S if missed else SILENT_S):
                orders.append(self._end(worker, f"nothing was heard of it for {silence:.0f} s", at_once=True))
            elif missed and waited is not None and waited > REPORT_S:
                orders.append(
                    self._end(worker, f"it has not come to the new world within {REPORT_S:.0f} s", at_once=True)
                )
        return orders

    def _end_the_unwanted(self) -> list[End]:
        """Newcomers whose host has gone from the list; members leave at the next step, with the others."""
        waiting = self._in(Stage.STARTING, Stage.READY)
        return [self._end(worker, "its host is no longer listed") for worker in waiting if not self._has_place(worker)]

    def _start_missing(self, now: float) -> list[Start]:
        orders = []
        taken = {(worker.host, worker.slot) for worker in self._workers}
        free = self.most - len([worker for worker in self._workers if worker.stage is not Stage.ENDING])
        for host, slots in self.hosts.items():
            for slot in range(slots):
                place = self._places.setdefault((host, slot), _Place())
                if free > 0 and (host, slot) not in taken and place.not_before <= now:
                    worker = Worker(next(self._numbers), host, slot, now, now)
                    self._workers.append(worker)
                    orders.append(Start(worker))
                    free -= 1
        return orders

    def _form(self, now: float) -> list[Order]:
        """A new world, as soon as every survivor of the last one is there, and enough are."""
        members = self._members()
        if any(worker.stage is Stage.TRAINING for worker in members):
            return []
        survivors = [worker for worker in members if self._has_place(worker)] or members
        ready = [worker for worker in self._in(Stage.READY) if self._has_place(worker)]
        coming = (survivors + ready)[: self.most]
        if not self._enough(len(coming), now):
            if self._short_since is not None and now - self._short_since > self.patience_s:
                self._finish = Finish(1, f"fewer than {self.fewest} workers for {self.patience_s:.0f} s")
                return [*self._end_all(self._finish.why), self._finish]
            return []
        dropped = [worker for worker in members if worker not in coming]
        orders: list[Order] = [self._end(worker, "its host is no longer listed") for worker in dropped]
        for worker in coming:
            worker.stage = Stage.TRAINING
        self.world, self._meeting_since, self._short_since = tuple(coming), None, None
        self.formed += 1
        return [*orders, Form(self.world)]

    def _enough(self, count: int, now: float) -> bool:
        if self._short_since is None:
            self._short_since = now
        waited = now - self._short_since
        return count >= self.first or (count >= self.fewest and (self.formed > 0 or waited > self.start_patience_s))

    def _end_of_world(self) -> Finish | None:
        """No member is left. A world in which nobody has fallen out and somebody is done has done its work."""
        codes = [self._codes.get(worker, _TOLD_TO) for worker in self.world]  # one told to end may still be at it
        committed = [code for code in codes if code in COMMITTED]
        if committed:
            return Finish(committed[0], "stopped, and committed")
        return Finish(0, "done") if codes[0] == 0 else None
