"""The arguments of the training loop as one value, when a training ends, and which evaluation is the best."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field

from hvd_train.config import Config, ScheduleConfig
from hvd_train.elastic.members import Change
from hvd_train.launch import launcher
from hvd_train.output import Output
from hvd_train.parts import Parts
from hvd_train.profiling import Profile
from hvd_train.progress.clock import Split, Stopwatch, Timer
from hvd_train.progress.stop import StopSignal
from hvd_train.state import Evaluation, TrainState
from hvd_train.step import Step
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
    step: Step
    output: Output
    clocks: Clocks
    stop: StopSignal
    profile: Profile
    arrival: Arrival | None  # shown after the first step in this world; None in the first world of a training


def reason_to_end(config: Config, state: TrainState) -> str | None:
    """Return why the training ends, or None. It follows from the state, so no restart trains beyond it."""
    schedule, best, last, epoch = config.schedule, state.best, state.last, state.progress.epoch
    if epoch >= schedule.epochs:
        return "done"
    if last and schedule.target_accuracy and last.top1 >= schedule.target_accuracy:
        return f"target accuracy {schedule.target_accuracy:.2%} reached"
    if best and schedule.patience and epoch - best.epoch >= schedule.patience:
        return f"nothing better since epoch {best.epoch}"
    return None


def better(schedule: ScheduleConfig, evaluation: Evaluation, best: Evaluation) -> bool:
    """Return whether an evaluation is better than the best one so far."""
    if schedule.best_by == "loss":
        return evaluation.loss < best.loss or math.isnan(best.loss)
    return evaluation.top1 > best.top1
