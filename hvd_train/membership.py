"""A rank's life among the others: how it meets them, what all decide by their reports,
and how the state travels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hvd_train import replicas
from hvd_train.batches import Batches
from hvd_train.config import Config
from hvd_train.data import identity
from hvd_train.data.loader import Loader
from hvd_train.data.sources import inner_sets
from hvd_train.errors import (
    FaultRepeats,
    RankDiffers,
    RankLost,
    ReplicasDiffer,
    UsageError,
    first_few,
    sendable,
)
from hvd_train.history import START, History, Label, Place
from hvd_train.launch import launcher
from hvd_train.launch.exit_report import During
from hvd_train.network.device import check_own_gpus, gpu_name, split_on
from hvd_train.network.digest import digest_of_module
from hvd_train.output import Output
from hvd_train.parts import Optimizers, Parts, fresh_state
from hvd_train.profiling import Profile
from hvd_train.progress.clock import TrainingClock
from hvd_train.progress.order import layout_for, resized_layout
from hvd_train.progress.shares import Shares, Speed
from hvd_train.result import Result, describe
from hvd_train.run_files import run_folder
from hvd_train.run_files.environment import environment, processor
from hvd_train.run_files.ledger import WEIGHTED
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.state import Snapshot, TrainState
from hvd_train.tasks.task import Measuring, Scores, Task
from hvd_train.updater import Updater
from hvd_train.validate import evaluate
from hvd_train.world import known_answer
from hvd_train.world.world import World, together

MIXED = (
    "the last bits depend on which rank computes a micro-batch, since ranks have different devices:"
)
START_OF_PROGRAM = Place().label(-1)
# a fault that repeats this often at one step is in the step, not in the cluster
_SAME_STEP_FAULTS = 5


class Overtaken(UsageError):
    """Other ranks are in a later training of the program: this one is over, with this `result`."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


@sendable
@dataclass(frozen=True)
class Member:
    """One process of a world, by its host and process id."""

    host: str
    process: int
    job: str = ""  # of Slurm

    def __str__(self) -> str:
        return f"{self.host} (process {self.process})"


@sendable
@dataclass(frozen=True)
class RankReport:
    """The report of one rank to all others. Its size does not depend on the number of ranks."""

    member: Member
    survives: bool = False  # whether the rank has a state of this run in memory
    step: int = 0  # steps done since the run began
    digest: str = ""  # of the state; empty if the rank has none
    reason: str = ""  # why the rank left its last world, for the user
    device: str = ""  # the name of its GPU or processor
    answer: str = ""  # of its device to `world.known_answer`; empty if ranks do not compare it
    speed: Speed | None = None  # in its last world, if that is known
    read_ahead: int = 0  # micro-batches that its loader processes read ahead
    run_dir: Path | None = None  # if the rank knows it
    waits: Label = START_OF_PROGRAM  # where its program is
    # where its state is: there, or further on if another rank has sent it
    state_at: Label = START_OF_PROGRAM
    session: int = 1  # the number of its training in its program
    ended: Any = None  # the result of the training before


@dataclass(frozen=True)
class Change:
    """A change of world, for the user."""

    before: tuple[Member, ...]
    after: tuple[Member, ...]
    reason: str
    step: int  # steps done at the start of the new world
    steps_lost: int

    @property
    def left(self) -> list[str]:
        """The members of the old world that are not in the new one."""
        return [str(member) for member in self.before if member not in {*self.after}]

    @property
    def came(self) -> list[str]:
        """The members of the new world that were not in the old one."""
        return [str(member) for member in self.after if member not in {*self.before}]

    def facts(self, step: int, seconds: float) -> dict[str, Any]:
        """Return the change for the journal; the first step after it took until
        `seconds` after the fault.
        """
        return {
            "step": step,
            "why": self.reason,
            "seconds": round(seconds, 3),
            "steps_lost": self.steps_lost,
            "world_size": len(self.after),
            "previous_size": len(self.before),
            "left": self.left,
            "came": self.came,
        }

    def describe(self, seconds: float) -> str:
        """Return the change in one line; `seconds` have passed since the fault."""
        moves = ((self.left, "left"), (self.came, "came"))
        parts = [f"{first_few(members, 3)} {how}" for members, how in moves if members]
        who = " and ".join(parts) or "the same ranks again"
        return (
            f"world {len(self.before)} -> {len(self.after)} at step {self.step}: {who} "
            f"({self.reason}); {seconds:.1f} s to the next step, {self.steps_lost} steps lost"
        )


@dataclass(frozen=True)
class Decision:
    """What all ranks decide alike at a rendezvous."""

    root: int  # the rank whose state all get
    from_disk: bool  # no rank has a state of this run: rank 0 loads the last commit
    sends: bool  # whether the states differ
    # whether a program is between two points, so that the layout of its step stays
    in_between: bool
    compares: bool  # whether ranks compare all that they hold before their next collective


def decide(reports: Sequence[RankReport], session: int = 1) -> Decision:
    """Return what all ranks do after these reports; this rank is in the training of this number.

    The survivor with the most advanced state and program sends its state. Raises: RankLost: if
    others are in the training before, which they are about to end; Overtaken: if others are in a
    later one; ReplicasDiffer: if survivors have come to one place with different weights.
    """
    last = max(reports, key=lambda report: report.session)
    if session < last.session:
        raise Overtaken(
            f"the job is in training {last.session} of its program, and this host has no files of "
            f"training {session}: name an --output-dir that all hosts share",
            last.ended,
        )
    if any(report.session < session for report in reports):
        raise RankLost("another rank is in the training before")
    survivors = [report for report in reports if report.survives]
    # Horovod may report a broken reduction as complete (patch C6). A state that was sent has been
    # compared then.
    own = {(report.waits, report.digest) for report in survivors if report.state_at == report.waits}
    if len(own) > len({waits for waits, _ in own}):
        resumes = "the same command resumes from the last commit"
        raise ReplicasDiffer(f"the survivors of a fault hold different weights: {resumes}")
    in_between = any(report.waits[-1] >= 0 for report in survivors)
    return Decision(
        root=_most_advanced(reports) if survivors else 0,
        from_disk=not survivors,
        sends=not survivors or len({(report.digest, report.state_at) for report in reports}) > 1,
        in_between=in_between,
        compares=in_between and len({(report.digest, report.waits) for report in reports}) > 1,
    )


def _most_advanced(reports: Sequence[RankReport]) -> int:
    """Return the survivor with the most advanced state and program, the lowest rank of several."""

    def place(rank: int) -> tuple[Any, ...]:
        report = reports[rank]
        return report.survives, report.state_at, report.waits, -rank

    return max(range(len(reports)), key=place)


def change_between(
    before: tuple[Member, ...], reports: Sequence[RankReport], root: int, step: int
) -> Change | None:
    """Return the change after `step` steps; `before` is the last world of the root, which
    sends its state, and empty without one.
    """
    if not before:
        return None
    leader = reports[root]
    after = tuple(report.member for report in reports)
    return Change(before, after, leader.reason, step, steps_lost=leader.step - step)


class Membership:
    """The part of this process in the worlds of a training, one after another.

    What changes with the world is made for each: `updater`, `shares`, `batches`, `profile`.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        parts: Parts,
        optimizers: Optimizers,
        name: str = "",
        replays: Path | None = None,
    ) -> None:
        """Compare the data of the ranks.

        `replays` is a finished run folder, or a commit, if that is only read.
        """
        self.config = config
        self.world = world
        self.parts = parts
        self.name = name
        self.clock = TrainingClock(config.run.commit_seconds, split_on(parts.device))
        constants = {
            f"constant module {n}": digest_of_module(m) for n, m in enumerate(parts.task.constants)
        }
        kind = {"device": parts.device.type}
        world.compare({**kind, **identity.facts(parts.identity), **constants})
        check_own_gpus(world, parts.device)
        sets = inner_sets(parts.data.train)
        world.allow_wait(max(getattr(each, "longest_wait_s", 0.0) for each in sets))
        self.output = Output(config, world.program, name, replays)
        self.history = History()
        self.during: During = "building"
        self.has_joined = False  # from then on its program continues from its own place
        # whether the state in memory is a state of this run, to be sent and committed
        self.survives = False
        self.change: Change | None = None  # the one that led to this world
        self.members: tuple[Member, ...] = ()  # of the last world; empty before the first
        self.left_at = 0.0  # when this rank left the last world, by time.perf_counter
        job = os.environ.get("SLURM_JOB_ID", "")
        self._member = Member(launcher.host_name(os.environ), os.getpid(), job)
        self._device = gpu_name(parts.device) or processor()
        is_checked = config.run.recheck_steps != 0
        self._answer = known_answer.answer_of(parts.device) if is_checked else ""
        self._devices = list[str]()  # of all ranks, each once
        self._reason = ""  # why it left, for the user
        self._speed: Speed | None = None  # there, if that is known
        self._run_dir: Path | None = None  # the run folder, once rank 0 has claimed one
        self._broken_step = -1
        self._faults_in_row = 0
        self._optimizers = optimizers
        self._state: TrainState | None = None
        # the state that this rank has got, until its program is there
        self._received: Snapshot | None = None
        self._resizes = False  # whether the global batch is to be fitted to the number of ranks
        # whether ranks compare all that they hold before the next collective
        self._compares = False

    @property
    def state(self) -> TrainState:
        """The state, once the ranks have met."""
        assert self._state is not None
        return self._state

    @property
    def steps(self) -> int:
        """The steps done; 0 before the ranks have met."""
        return self._state.progress.step if self._state else 0

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a whole step."""
        layout = self.state.layout
        return len(layout.micro_batches(range(layout.global_batch)))

    # Worlds

    def join(self) -> None:
        """Meet the other ranks for the first time. Raises as `meet` does."""
        self.world.join(self._enter)
        self.has_joined = True
        if self.change is None:
            self._announce()

    def meet(self, lost: RankLost | None = None) -> None:
        """Form another world, after a fault or because hosts came or went; all ranks
        then have the same state.

        Raises: RankLost: if no other world can form; FaultRepeats: if the same step fails again and
        again.
        """
        self._reason = "a rank was lost" if lost else "hosts came or went"
        self._speed = self.shares.speed
        self.left_at = time.perf_counter()
        self.profile.drop(self._reason)
        self.batches.restart()
        if lost is not None:
            lost.step = self.steps
            self._count_fault(lost, lost.step)
        self.world.meet(self._enter, lost)

    def _count_fault(self, error: RankLost, step: int) -> None:
        """Raise FaultRepeats if the same step fails for the fifth time in a row and
        no rank has left meanwhile.
        """
        self._faults_in_row = self._faults_in_row + 1 if self._broken_step == step else 1
        self._broken_step = step
        if self._faults_in_row == _SAME_STEP_FAULTS:
            line = (
                f"step {step + 1} has failed {self._faults_in_row} times in a row; "
                f"the last time: {error}"
            )
            raise FaultRepeats(line) from error

    def _enter(self) -> None:
        """Enter a world: all ranks get the state of the survivor that has done the most.

        If no rank survives, they load the last commit; without a commit they start fresh. Raises:
        RankDiffers: if this rank computes wrongly, compared with others of its kind;
        ReplicasDiffer: if survivors differ, or ranks after loading; UsageError: if rank 0 cannot
        claim the run folder, or the batch does not fit the data; RankLost: each rank keeps a whole
        state.
        """
        world = self.world
        self.during = "rendezvous"
        # Built once: hooks on the parameters stay, and two that reduce would sum each gradient
        # twice.
        if self._state is None:
            self._state = fresh_state(
                self.config, world, self.parts, self._optimizers, history=self.history
            )
        state = self._state

        # Each rank reports its progress. A state that it has received is as it was then.
        if self._received is not None:
            state.load(self._received, behind=True)
        reports = world.gather(self._report())
        world.watch([(report.member.host, report.member.process) for report in reports])
        self._leave_if_wrong(reports)
        decision = decide(reports, len(world.program.begun))

        # Rank 0 claims the run folder and, if no rank has a state, loads the last commit.
        claim = together(world, lambda: self._claim(reports, decision))
        self._run_dir = folder = world.broadcast(self._run_dir, 0)
        assert folder is not None
        world.program.begin_in(folder.parent if self.name else folder)

        # All ranks load the state of one rank, unless all have it already.
        if decision.sends:
            received = replicas.send_state(state, world, decision.root, behind=self.has_joined)
            if received is not None and not decision.from_disk:
                self._received = received
                self.history.receive(reports[decision.root].state_at)
            # it is loaded again until rank 0 has opened the folder
            self.survives = not decision.from_disk
            if world.place.size > 1:
                replicas.confirm_equal(state, world)
        self._compares = decision.compares

        # The program has set the learning rate for the size of a step that is interrupted.
        self._resizes = self.config.batch.on_resize == "per-worker"
        if self._resizes and not decision.in_between:
            self._resize()
        self._note_members(reports, decision)
        self.output.open(claim, state)
        self.output.write(run_folder.RANKS, [vars(member) for member in self.members])
        self._begin_world(folder, reports)
        self.history.enter_world()
        if not self.has_joined:
            self.clock.join(state.seconds)
        self.during = "training"

    def _leave_if_wrong(self, reports: Sequence[RankReport]) -> None:
        """Raise RankDiffers if the device of this rank computes otherwise than others of its kind,
        and RankLost if the device of another rank does.
        """
        wrong = known_answer.wrong_ranks(
            [report.device for report in reports], [report.answer for report in reports]
        )
        if self.world.place.rank in wrong:
            raise RankDiffers(known_answer.problem(self.parts.device, self._member.host))
        if wrong:
            raise RankLost(f"{reports[wrong[0]].member.host} computes wrongly")

    def _report(self) -> RankReport:
        """Return the report of this rank for the other ranks."""
        history = self.history
        program = self.world.program
        return RankReport(
            self._member,
            device=self._device,
            answer=self._answer,
            speed=self._speed,
            read_ahead=self.parts.train_loader.read_ahead,
            survives=self.survives,
            step=self.state.progress.step,
            waits=history.waits,
            state_at=history.state_at,
            digest=self.state.digest() if self.survives else "",
            reason=self._reason,
            run_dir=self._run_dir,
            session=len(program.begun),
            ended=program.ended[-1] if program.ended else None,
        )

    def _claim(self, reports: Sequence[RankReport], decision: Decision) -> RunFolder | None:
        """Claim the run folder on rank 0, and load its last commit if no rank has a state."""
        state = self.state
        place = self.world.place
        if place.rank != 0:
            return None
        if self.output.replays is not None:
            self.output.replay(state, self.output.replays)
            self._run_dir = self.output.replays
            return None
        claim = self.output.claim(
            state,
            next((report.run_dir for report in reports if report.run_dir), None),
            layout_for(self.config.batch, place.size),  # if the run is new
            self.parts.train_loader.num_samples,
            from_disk=decision.from_disk,
        )
        self._run_dir = claim.path
        return claim

    def _note_members(self, reports: Sequence[RankReport], decision: Decision) -> None:
        before = () if decision.from_disk else self.world.broadcast(self.members, decision.root)
        self.survives = True
        self.members = tuple(report.member for report in reports)
        self.change = change_between(before, reports, decision.root, self.state.progress.step)
        if self.change is not None and self.change.left:
            self._faults_in_row = 0  # a rank that left explains the fault

    def _begin_world(self, run_dir: Path, reports: Sequence[RankReport]) -> None:
        """Make what belongs to this world of ranks with these reports. Raises RankLost."""
        config = self.config
        parts = self.parts
        state = self.state
        place = self.world.place
        journal = self.output.journal
        split = self.clock.split
        self.updater = Updater(config, self.world, parts.model, parts.device, parts.training, split)
        balance = config.run.balance
        devices = sorted({report.device for report in reports})
        if len(devices) > 1 and devices != self._devices:
            journal.event("note", f"{MIXED} {first_few(devices)}")
        self._devices = devices
        # the passes of batch norm over ranks, which wait for one another, decide its statistics
        follow = not config.model.sync_batch_norm and (
            balance == "on" or (balance == "auto" and len(self._devices) > 1)
        )
        read_ahead = max(report.read_ahead for report in reports)
        self.shares = Shares(place.size, place.rank, follow_speed=follow, read_ahead=read_ahead)
        self.shares.begin([report.speed for report in reports], self.micro_batches, self.steps)
        self.batches = Batches(config, parts, state, place, split, self.shares)
        steps = config.run.profiled_steps
        file = (
            run_dir
            / "profile"
            / f"steps-{steps.start}-to-{steps.stop - 1}-rank-{place.rank}.json.gz"
        )
        self.profile = Profile(steps, file, parts.device, journal, self.clock)
        limit = config.run.max_seconds
        journal.begin(
            config.schedule.epochs,
            self.batches.epoch_size,
            parts.task.sample,
            parts.task.best,
            limit,
        )
        journal.catch_up(state.recent, state.last_step, state.last_epoch)
        self.profile.step_done(state.progress.step)
        self.clock.enter_world()

    def _announce(self) -> None:
        """Show the user the training and its machines."""
        state = self.state
        parts = self.parts
        place = self.world.place
        journal = self.output.journal
        text = describe(self.config, parts, state, place)
        journal.event(
            "start",
            f"{self.name}: {text}" if self.name else text,
            world_size=place.size,
            num_samples=parts.train_loader.num_samples,
            epoch_samples=self.batches.epoch_size,
            order=self._name_of_order(),
            seed=self.config.seed,
            best=parts.goal.name,
            higher=parts.goal.higher,
            sample=parts.task.sample,
        )
        hosts = [member.host for member in self.members]
        self.output.write(run_folder.ENVIRONMENT, environment(hosts, gpu_name(parts.device)))
        self.output.write(run_folder.DATA, state.data)
        if self.config.run.ledger and parts.sample_weights is not None:
            self.output.write(run_folder.WEIGHTS, parts.sample_weights)
        if state.progress.step == 0:
            for note in parts.notes:
                journal.event("note", note)

    def _name_of_order(self) -> str:
        """Return how an audit can know the order: WEIGHTED, a name in ORDERS, or not."""
        if self.parts.sample_weights is not None:
            return WEIGHTED
        return "own" if "order" in self.parts.identity else self.config.batch.order

    def _resize(self) -> None:
        """Fit the global batch to the number of ranks. Called when no step is half done."""
        samples = self.parts.train_loader.num_samples
        self.state.change_layout(resized_layout(self.config.batch, self.world.place.size, samples))
        self._resizes = False

    def hold_state(self) -> None:
        """Keep a loaded state as it is until this program has come to its place: code that runs
        again may change it.
        """
        point = self.state.point
        if self._received is None and point.part != START:
            self._received = {**self.state.snapshot(), "answers": []}
            self.history.receive(point.place.label(-1))

    # Between two changes of the world

    def come_to_point(self) -> None:
        """Note that the program has come to a point."""
        # else the others have begun the next step before they could
        if self._resizes and not self.history.is_behind:
            self._resize()
            self.batches.restart()
        self.arrive()

    def arrive(self) -> bool:
        """Take a received state once more, if the program has come to its
        place; return whether it did.
        """
        received = self._received
        loads = self.history.arrives()
        if loads and received is not None:
            layout = self.state.layout  # the world may have changed it meanwhile
            self.state.load(received, behind=True)
            self.state.change_layout(layout)
        if not self.history.is_behind:
            self._received = None
        return loads

    def expect_differences(self) -> None:
        """Let ranks compare all that they hold before the next collective."""
        self._compares = True

    def compare(self, own: SimpleNamespace) -> None:
        """Compare what the ranks hold with these registered values, if their
        programs may have differed. Raises as `replicas.compare_programs` does.
        """
        if self._compares:
            replicas.compare_programs(self.state, own, self.world)
            self._compares = False

    def evaluate(self, task: Task, measuring: Measuring, loader: Loader) -> Scores:
        """Return the scores of the weights that count over a set. Raises RankLost."""
        return evaluate(
            self.config,
            self.parts.device,
            task,
            measuring,
            self.state.result,
            loader,
            self.world,
            self._owned_of_evaluation if self.shares.follow_speed else None,
        )

    def _owned_of_evaluation(self, _number: int, count: int) -> list[int]:
        return self.shares.owned(self.steps, count)

    def close(self) -> None:
        """Finish what is being written, end the loader processes, and leave the model to others."""
        self.output.close()
        if self.has_joined:
            self.batches.restart()
        self.world.unwrap()
        for loader in (self.parts.train_loader, self.parts.val_loader, self.parts.test_loader):
            if loader is not None:
                loader.close()
