"""Random plays of the protocol by which programs survive: deaths, newcomers and
restarts, without threads.

A rank is a generator. It gives what it does with other ranks, and gets their values or a RankLost.
Numbers stand for weights, so that equality is exact.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

from hvd_train.errors import RankLost
from hvd_train.history import HEAD, STEPS, TAIL, History, Label, Place
from hvd_train.membership import Member, RankReport, decide

EPOCHS = 2
STEPS_OF_EPOCH = 3
START = Place()
PLAYS = 1000
Doing = Generator[Any, Any, Any]
"""What a rank does: ("all", a value) gets the values of all ranks, and ("meet", a
report) those of a new world."""


def mix(*values: object) -> int:
    return hash(values) % 1_000_003


@dataclass
class State:
    """All that survives."""

    weights: int = 1
    epoch: int = 0
    cursor: int = 0
    steps: tuple[tuple[int, int], ...] = ()  # each finished step
    place: Place = START  # of the last point, with the registered values there
    own: int = 1
    own_at_epoch: int = 1
    results: dict[Label, Any] = field(default_factory=dict)

    def digest(self) -> int:
        return mix(self.weights, self.epoch, self.cursor, len(self.steps))


class Rank:
    """One process with a program, which registers a value, evaluates, and
    writes to its weights itself.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.number = 0
        self.state = State()
        self.history = History()
        self.own = 1
        self.survives = False
        self.has_joined = False
        self.compares = False
        self.received = None
        self.doing = self.program()
        self.waits = next(self.doing)

    def program(self) -> Doing:
        state = self.state
        history = self.history
        yield from self.meet()
        self.has_joined = True
        self.hold_state()
        self.own = mix(self.own, (yield from self.collective()))
        state.weights = mix(state.weights, "initialized")
        history.begin_at(state.place)
        while state.epoch < EPOCHS:
            if history.is_replayed:
                history.begin_epoch_again()
                self.own = state.own_at_epoch
                self.arrive()
            else:
                yield from self.come_to(state.epoch, HEAD)
            epoch = history.at.epoch
            self.own = mix(self.own, (yield from self.collective()))
            state.weights = mix(state.weights, "shrunk")
            if history.begin_steps():
                self.own = state.own
                self.arrive()
            while history.repeats_step(STEPS_OF_EPOCH) or (yield from self.comes_to_step(epoch)):
                self.own = mix(self.own, (yield from self.collective(updates=True)))
                state.weights = mix(state.weights, "written")
                if self.own % 2:  # a branch that follows from a registered value
                    self.own = mix(self.own, (yield from self.collective()))
            if history.at.part != TAIL:
                yield from self.come_to(epoch, TAIL)
            self.own = mix(self.own, (yield from self.collective()))
            state.weights = mix(state.weights, "pruned")
            self.own = mix(self.own, (yield from self.collective()))
            if state.epoch == epoch:
                state.epoch += 1
                state.cursor = 0

    def comes_to_step(self, epoch: int) -> Doing:
        state = self.state
        if self.history.at.part == TAIL or state.epoch != epoch or state.cursor == STEPS_OF_EPOCH:
            return False
        yield from self.come_to(epoch, STEPS)
        return True

    def collective(self, *, updates: bool = False) -> Doing:
        """Do an update or an evaluation of all ranks, as `Loops` does."""
        state = self.state
        history = self.history
        while not history.is_recorded:
            try:
                history.begin_collective()
                self.arrive()
                mine = history.waits, state.weights, self.own
                if self.compares:
                    of_ranks = yield "all", mine
                    assert set(of_ranks) == {mine}, "ranks hold the same at the same place"
                    self.compares = False
                of_ranks = yield "all", mine
                assert set(of_ranks) == {mine}, "ranks do the same with the same"
                if updates:
                    state.weights = mix(*mine)
                    state.cursor += 1
                    state.steps = *state.steps, (state.epoch, state.cursor)
                history.record(mix(*mine), self.job.votes if updates else None)
            except RankLost:
                yield from self.meet()
        return history.take_result()

    def come_to(self, epoch: int, part: int) -> Doing:
        state = self.state
        state.place = Place(epoch, part, len(state.steps), state.cursor)
        state.own = self.own
        if part == HEAD:
            state.own_at_epoch = self.own
        self.history.come_to(state.place)
        self.arrive()
        commits, changes = self.history.take_agreed() or (False, False)
        if commits:
            yield from self.commit()
        if changes:
            yield from self.meet()

    def commit(self) -> Doing:
        try:
            of_ranks = yield "all", self.state.place
            assert len({*of_ranks}) == 1, "all ranks commit at the same point"
        except RankLost:
            yield from self.meet()
        else:
            self.job.disk = self.snapshot()

    def arrive(self) -> None:
        if self.history.arrives() and self.received is not None:
            self.load(self.received, behind=True)
        if not self.history.is_behind:
            self.received = None

    def hold_state(self) -> None:
        if self.received is None and self.state.place != START:
            self.received = replace(self.snapshot(), results={})
            self.history.receive(self.state.place.label(-1))

    def meet(self) -> Doing:
        """Enter worlds until all ranks of one have the same state, as `Membership` does."""
        while True:
            if self.received is not None:
                self.load(self.received, behind=True)
            reports = yield "meet", self.report()
            try:
                decision = decide(reports)
                if decision.sends:
                    states = yield "all", self.job.disk if decision.from_disk else self.snapshot()
                    state = states[decision.root]
                    if self.number != decision.root or decision.from_disk:
                        self.load(state or State(), behind=self.has_joined)
                        if not decision.from_disk:
                            self.received = state
                            self.history.receive(reports[decision.root].state_at)
                    self.survives = not decision.from_disk
                    assert len({*(yield "all", self.state.digest())}) == 1, (
                        "all ranks have the state that was sent"
                    )
                self.survives = True
                self.compares = decision.compares
                self.history.enter_world()
                return
            except RankLost:
                continue

    def report(self) -> RankReport:
        return RankReport(
            Member("host", 1),
            self.survives,
            digest=str(self.state.digest()) if self.survives else "",
            waits=self.history.waits,
            state_at=self.history.state_at,
        )

    def snapshot(self) -> State:
        return replace(self.state, results=dict(self.history.results))

    def load(self, state: State, *, behind: bool) -> None:
        mine = self.state
        kept = mine.place, mine.own, mine.own_at_epoch
        vars(mine).update(vars(state))
        if behind:
            mine.place, mine.own, mine.own_at_epoch = kept
        self.history.load(state.results, behind=behind)


class Job:
    """Ranks that die and come.

    After a death some survivors have the values of all, and others have not.
    """

    def __init__(self, seed: int, deadly: float) -> None:
        self.random = random.Random(seed)
        self.deadly = deadly
        self.disk = None
        self.votes = (False, False)
        self.ended = []
        self.world = []
        self.outside = []
        self.is_broken = True
        self.seen = Counter[str]()

    def start(self, number: int) -> None:
        self.outside += [Rank(self) for _ in range(number)]

    def play(self) -> None:
        """Let the ranks do what they wait for, until all have ended."""
        self.start(self.random.randint(1, 3))
        while self.world or self.outside:
            meets = [rank for rank in self.world if rank.waits[0] == "meet"]
            if len(meets) == len(self.world):
                self.form_world()
            elif self.is_broken or meets:
                self.is_broken = True
                for rank in self.world:
                    if rank.waits[0] == "all":
                        self.go_on(rank, RankLost("a rank is gone"))
            else:
                self.exchange()

    def form_world(self) -> None:
        self.world += self.outside
        self.outside = []
        self.is_broken = False
        reports = [rank.waits[1] for rank in self.world]
        self.seen["behind"] += len({report.waits for report in reports if report.survives}) > 1
        self.seen["restarts"] += self.disk is not None and not any(r.survives for r in reports)
        for number, rank in enumerate([*self.world]):
            rank.number = number
            self.go_on(rank, reports)

    def exchange(self) -> None:
        values = [rank.waits[1] for rank in self.world]
        self.votes = self.random.random() < 0.3, self.random.random() < 0.2
        if self.votes[1] and self.random.random() < 0.5:
            self.start(1)
        victims = []
        if self.random.random() < self.deadly:
            victims = self.random.sample(self.world, self.random.randint(1, len(self.world)))
            self.is_broken = True
        self.seen["deaths"] += len(victims)
        for victim in victims:
            victim.doing.close()
        self.world = survivors = [rank for rank in self.world if rank not in victims]
        for rank in [*survivors]:
            has_values = not victims or self.random.random() < 0.5
            self.go_on(rank, values if has_values else RankLost("a rank is gone"))
        if (victims and self.random.random() < 0.7) or not (survivors or self.ended):
            self.start(self.random.randint(1, 2))

    def go_on(self, rank: Rank, given: Any) -> None:
        try:
            rank.waits = (
                rank.doing.throw(given) if isinstance(given, RankLost) else rank.doing.send(given)
            )
        except StopIteration:
            self.world.remove(rank)
            self.ended.append(rank)


def outcome(job: Job) -> set[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """Return weights, values and steps of all ranks that have ended."""
    job.play()
    return {(rank.state.weights, rank.own, rank.state.steps) for rank in job.ended}


def test_any_play_ends_as_the_undisturbed_one() -> None:
    """Each step counts once, none is lost, and all ranks end with the same weights and values."""
    (expected,) = outcome(Job(0, deadly=0.0))
    assert list(expected[2]) == [
        (epoch, step + 1) for epoch in range(EPOCHS) for step in range(STEPS_OF_EPOCH)
    ]
    seen = Counter(deaths=0, behind=0, restarts=0)
    for seed in range(PLAYS):
        job = Job(seed, deadly=0.2 * (seed % 3 > 0))
        assert outcome(job) == {expected}, f"play {seed}"
        seen += job.seen
    assert min(seen.values()) > PLAYS / 20, seen
