"""Elastic jobs of threads: faults are data, and the real roster forms the worlds.

Trainings of 20 steps through faults.

The roster's time runs faster than the wall clock, so that its back-off costs a test little. It
stands still until the survivors of a broken world have asked for a rank, so that no new worker
joins earlier, even on a slow machine.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from hvd_train.elastic.roster import (
    FAULT_REPEATS,
    End,
    Finish,
    FormWorld,
    Roster,
    Stage,
    Start,
    Worker,
)
from hvd_train.errors import RankDiffers, RankLost, ReplicasDiffer
from hvd_train.launch.exit_report import ExitReport
from hvd_train.launch.workers import Request
from hvd_train.run_files.ledger import audit
from hvd_train.world.world import Gradients, LocalWorld, Place
from tests.support import runs
from tests.support.launching import json_lines
from tests.support.runs import Weights, equal, largest_difference, small_config, trained
from tests.support.worlds import DEADLINE_S, Killed, Meeting, ThreadWorld

T = TypeVar("T")
SPEED = 50.0
STANDS_STILL_S = 10.0  # for so long at most
TOLERANCE = 1e-5
STEPS = 20
ONE, TWO, THREE = ((f"h{n}", 1) for n in (1, 2, 3))
NUMBERS = itertools.count()


@dataclass(frozen=True)
class _AtStep:
    step: int  # from 1, over the whole run
    rank: int


class Kill(_AtStep):
    """In the reductions of this step, or later if it is not there, this rank dies."""


class Tell(_AtStep):
    """Before this step this rank gets a signal."""


class Unheard(_AtStep):
    """The reductions of this step are done on all ranks but this one,
    which gets a fault instead.
    """


@dataclass(frozen=True)
class Hosts:
    """When the reductions of this step have begun, the list of hosts becomes this one."""

    step: int
    slots: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class UnheardSum:
    """The `turn`-th sum of this name (from 1) that this rank is part of is done
    on all ranks but this one.
    """

    name: str
    rank: int
    turn: int


@dataclass(frozen=True)
class _InWorld:
    world: int  # from 1
    rank: int
    turn: int = 1  # from 1


class KillMeeting(_InWorld):
    """When the ranks of this world exchange something for this time, this rank dies."""


class KillGather(_InWorld):
    """When the ranks of this world gather something for this time, this rank dies."""


class UnheardGather(_InWorld):
    """What the ranks of this world gather this time is there on all but
    this rank: it gets a fault.
    """


Event = Kill | Hosts | Tell | Unheard | UnheardSum | KillMeeting | KillGather | UnheardGather


@dataclass
class Job:
    """What the workers of a job share."""

    roster: Roster
    events: list[Event]
    body: Callable[[ElasticThreadWorld], Any]
    kind: type[ElasticThreadWorld]
    changed: threading.Condition = field(default_factory=threading.Condition)
    seats: dict[int, tuple[int, Meeting]] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    finish: Finish | None = None
    steps: int = 0  # that at least one worker has finished
    folder: Path | None = None  # of the program, once a worker has claimed it
    threads: list[threading.Thread] = field(default_factory=list)  # of its workers
    started: list[int] = field(default_factory=list)  # the numbers of these
    _seconds: float = 0.0

    def run(self) -> Job:
        wall = time.monotonic()
        deadline = wall + DEADLINE_S
        self._seconds = wall * SPEED
        still = 0.0
        with self.changed:
            while self.finish is None:
                before = wall
                wall = time.monotonic()
                assert wall < deadline, f"the job hangs: {self.roster}"
                # A worker with a seat in a broken world is about to ask for another.
                still = (
                    still + wall - before
                    if any(meeting.lost for _, meeting in self.seats.values())
                    else 0.0
                )
                if not 0 < still < STANDS_STILL_S:
                    # It never jumps, so a slow machine makes no worker late.
                    self._seconds += min((wall - before) * SPEED, 0.5)
                for number in self.started:
                    self.roster.heartbeat_received(number, self._seconds)
                for command in self.roster.commands(self._seconds):
                    self._carry_out(command)
                self.changed.wait(0.01)
        for thread in self.threads:  # one may still write into the run folder
            thread.join(DEADLINE_S)
        if self.errors:
            raise self.errors[0]
        return self

    def _carry_out(self, command: Any) -> None:
        if isinstance(command, Start):
            self.threads.append(
                threading.Thread(target=self._live, args=(command.worker,), daemon=True)
            )
            self.threads[-1].start()
            self.started.append(command.worker.number)
        elif isinstance(command, FormWorld):
            meeting = Meeting(len(command.workers))
            self.seats = {
                worker.number: (rank, meeting) for rank, worker in enumerate(command.workers)
            }
            self.sizes.append(len(command.workers))
        elif isinstance(command, End):
            self.seats.pop(command.worker.number, None)
        elif isinstance(command, Finish):
            self.finish = command
        self.changed.notify_all()

    def _live(self, worker: Worker) -> None:
        code = 0
        world = self.kind(self, worker.number)
        try:
            result = self.body(world)
            with self.changed:
                self.results.append(result)
        except (Killed, SystemExit) as error:
            code = 0 if isinstance(error, SystemExit) else 137
        except ReplicasDiffer as error:
            avoids_host = isinstance(error, RankDiffers)
            report = ExitReport(4, str(error), "training", avoids_host=avoids_host)
            with self.changed:
                self.roster.exit_report_received(worker.number, report, self._seconds)
            code = 4
        except BaseException as error:
            self.errors.append(error)
            code = FAULT_REPEATS  # it ends the job
        with self.changed:
            self.seats.pop(worker.number, None)
            world._meeting.break_up("a worker has ended")
            self.roster.worker_exited(worker.number, code, self._seconds)
            self.changed.notify_all()

    def begun(self, rank: int, step: int) -> None:
        """Note that a worker has begun the reductions of this step.

        Raises: Killed: if it must die.
        """
        with self.changed:
            due = [e for e in self.events if isinstance(e, (Kill, Hosts)) and e.step <= step]
            for event in due:
                if isinstance(event, Hosts):
                    self.events.remove(event)
                    self.roster.hosts_found(dict(event.slots))
                elif event.rank == rank:
                    self.events.remove(event)
                    raise Killed(f"rank {rank} in step {step}")

    def reached(self, event: Event, error: type[BaseException] = RankLost) -> None:
        """Note that a worker is at the place of an event. Raises: error: if the job has it."""
        with self.changed:
            if event in self.events:
                self.events.remove(event)
                raise error(str(event))


class ElasticThreadWorld(ThreadWorld):
    """One worker of an elastic job."""

    most_bytes = 2000  # several pieces per model, so that a fault can come between them

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(0, Meeting(1))
        self._job = job
        self._number = number
        self._exchanges = 0
        self._has_met = False
        self._step = 1  # the worker's next step; others may still end the previous one
        self._sums = Counter()

    @override
    def prepare(self, build: Callable[[], T]) -> T:
        return build()

    @override
    def compare(self, facts: Mapping[str, str]) -> None:
        """Compare nothing: in an elastic job the driver does, before a worker joins."""

    @property
    @override
    def joins_folder(self) -> Path | None:
        return None if self._has_met else self._job.folder

    @override
    def join(self, sync: Callable[[], None] = lambda: None) -> None:
        try:
            if self._has_met:
                sync()
            else:
                self.meet(sync)
        except RankLost as error:
            self.meet(sync, error)
        self._has_met = True
        self._job.folder = self.program.folder

    @override
    def meet(self, sync: Callable[[], None] = lambda: None, after: RankLost | None = None) -> None:
        while True:
            self._meeting.break_up(str(after))
            self._join()
            try:
                sync()
                return
            except RankLost as error:
                after = error

    @override
    def requested(self, *, got_signal: bool = False) -> Request:
        job = self._job
        with job.changed:
            if (event := Tell(self._step, self.place.rank)) in job.events:
                job.events.remove(event)
                job.roster.signal_received(self._number, job._seconds)
            return job.roster.requested()

    @override
    def reduce(self) -> Gradients:
        self._job.begun(self.place.rank, self._step)
        gradients = super().reduce()
        self._job.reached(Unheard(self._step, self.place.rank))
        with self._job.changed:
            self._job.steps = max(self._job.steps, self._step)
        self._step += 1
        return gradients

    @override
    def sum(self, tensor: Tensor, name: str) -> Tensor:
        total = super().sum(tensor, name)
        self._sums[name] += 1
        self._job.reached(UnheardSum(name, self.place.rank, self._sums[name]))
        return total

    def _exchange(self, name: str, value: Any) -> list[Any]:
        job = self._job
        place = (len(self._job.sizes), self.place.rank)
        self._exchanges += 1
        job.reached(KillMeeting(*place, self._exchanges), Killed)
        if name != "gather":
            return super()._exchange(name, value)
        turn = self._turns[name] + 1
        job.reached(KillGather(*place, turn), Killed)
        values = super()._exchange(name, value)
        job.reached(UnheardGather(*place, turn))
        return values

    def _join(self) -> None:
        job = self._job
        with job.changed:
            job.seats.pop(self._number, None)
            job.roster.rank_requested(self._number, job._seconds)
            job.changed.notify_all()
            while self._number not in job.seats:
                worker = job.roster.worker(self._number)
                if worker is None or worker.stage is Stage.ENDING or job.finish:
                    raise SystemExit(0)
                job.changed.wait(1.0)
            rank, meeting = job.seats[self._number]
            self._step = job.steps + 1  # no rank of a new world has started a step
        self._meeting = meeting
        self._turns.clear()
        self._exchanges = 0
        self.place = Place(rank, meeting.size, rank, meeting.size)


def run_elastic(
    body: Callable[[ElasticThreadWorld], T],
    hosts: Mapping[str, int],
    events: Sequence[Event] = (),
    *,
    first: int,
    fewest: int = 1,
    most: int = 8,
    kind: type[ElasticThreadWorld] | None = None,
) -> Job:
    """Run a job to its end; its results come from the workers of the last world."""
    roster = Roster(
        first, fewest, most, patience_s=DEADLINE_S * SPEED, start_patience_s=DEADLINE_S * SPEED
    )
    roster.hosts_found(hosts)
    return Job(roster, list(events), body, kind or ElasticThreadWorld).run()


def play(
    events: list[Event],
    *hosts: tuple[str, int],
    make: Any = runs.convnet,
    data: Any = runs.few_digits,
    **settings: Any,
) -> tuple[Job, Path]:
    """Train 20 steps through these events; return the job and its run folder.

    The first world has all hosts.
    """
    folder = Path(f"run-{next(NUMBERS)}")
    limits = {name: settings.pop(name) for name in ("fewest", "most", "kind") if name in settings}
    config = small_config(epochs=2, ledger=True, output_dir=folder, **settings)
    job = run_elastic(
        lambda world: trained(world, config, make, data),
        dict(hosts),
        events,
        first=sum(n for _, n in hosts),
        **limits,
    )
    assert job.finish is not None
    assert job.finish.exit_code == 0, job.finish
    return job, folder


def undisturbed(make: Any = runs.convnet, data: Any = runs.few_digits, **settings: Any) -> Weights:
    """Return the weights of the same training on one rank without faults."""
    config = small_config(epochs=2, output_dir=Path(f"undisturbed-{next(NUMBERS)}"), **settings)
    return trained(LocalWorld(), config, make, data)[1]


def check(job: Job, folder: Path, expected: Weights) -> None:
    """Assert that no step is lost, each sample counts once, ranks are equal, and weights
    are the undisturbed ones.
    """
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS), report
    assert all(event["steps_lost"] == 0 for event in events_of(folder))
    assert (written(folder, "step"), written(folder, "epoch")) == ([*range(1, STEPS + 1)], [1, 2])
    weights = [weights for _, weights in job.results]
    assert all(equal(weights[0], other) for other in weights)
    assert largest_difference(weights[0], expected) <= TOLERANCE
    assert equal(weights[0], torch.load(folder / "model-final.pt", weights_only=True))


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Return the changes of world in metrics.jsonl."""
    return [line for line in json_lines(folder / "metrics.jsonl") if line.get("name") == "world"]


def written(folder: Path, kind: str) -> list[int]:
    """Return the numbers of the steps or epochs in metrics.jsonl."""
    return [line[kind] for line in json_lines(folder / "metrics.jsonl") if line["kind"] == kind]
