"""The arguments of the training loop as one value, when a training ends, and which evaluation is the best."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from hvd_train.config import Config
from hvd_train.elastic.members import Change
from hvd_train.launch import launcher
from hvd_train.output import Output
from hvd_train.parts import Parts
from hvd_train.profiling import Profile
from hvd_train.progress.clock import Split, Stopwatch, Timer
from hvd_train.progress.stop import StopSignal
from hvd_train.state import TrainState
from hvd_train.tasks.task import targets_of
from hvd_train.updater import Updater
from hvd_train.world.world import World


@dataclass(frozen=True)
class Clocks:
    """The clocks of a training on this rank."""

    commit_timer: Timer  # due when it is time for another checkpoint
    time_limit: Timer  # due when `--max-time` is over, counted from the start of the job
    stopwatch: Stopwatch = field(default_factory=Stopwatch)  # images per second
    split: Split = field(default_factory=Split)  # the phases of the steps in this world
    started: float = field(default_factory=time.perf_counter)  # when this process began to build the training

    @classmethod
    def of(cls, config: Config) -> Clocks:
        """Return clocks that start now; the time limit has run since the start of the job."""
        passed = launcher.running_for(os.environ, launcher.age_s())
        return cls(Timer(config.run.commit_seconds), Timer(config.run.max_seconds, passed=passed))


@dataclass(frozen=True)
class Arrival:
    """The change that led to this world."""

    change: Change
    reported_at: float  # when this rank made its report (time.perf_counter); `change.waited_s` counts up to then

    def seconds(self) -> float:
        """Return the seconds since the fault, or since the request to change."""
        return self.change.waited_s + time.perf_counter() - self.reported_at


@dataclass(frozen=True)
class Job:
    """A training in one world: the settings, the ranks, the parts and the state."""

    config: Config
    world: World
    parts: Parts
    state: TrainState
    updater: Updater
    output: Output
    clocks: Clocks
    stop: StopSignal
    profile: Profile
    arrival: Arrival | None  # shown after the first step in this world; None in the first world of a training


class WorldChanged(Exception):
    """Raised by all ranks after the same step to form another world."""


def reason_to_end(job: Job) -> str | None:
    """Return why the training ends, or None. It follows from the state, so no restart trains beyond it."""
    schedule, state = job.config.schedule, job.state
    best, last, epoch = state.best, state.last, state.progress.epoch
    if epoch >= schedule.epochs:
        return "done"
    for goal, value in targets_of(job.parts.task, schedule).items():
        if last and not goal.better(value, last.figures[goal.name]):
            return f"target {goal.name} {value:g} reached"
    if best and schedule.patience and epoch - best.epoch >= schedule.patience:
        return f"nothing better since epoch {best.epoch}"
    return None
