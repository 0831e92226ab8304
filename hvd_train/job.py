"""What the loop works with: the parts of a run in one world, as one value."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from hvd_train.config import Config
from hvd_train.elastic.members import Change
from hvd_train.handover import Handover
from hvd_train.launch import launcher, processes
from hvd_train.output import Output
from hvd_train.parts import Parts
from hvd_train.profiling.profile import Profile
from hvd_train.progress.clock import Split, Stopwatch, Timer
from hvd_train.progress.order import Share
from hvd_train.progress.stop import StopSignal
from hvd_train.state import TrainState
from hvd_train.step import Step
from hvd_train.world.world import World


@dataclass(frozen=True)
class Clocks:
    """What measures the time of a training on this rank."""

    commit_timer: Timer
    """Says when the last checkpoint is old enough for another one."""
    time_limit: Timer
    """Says when `--max-time` is over, counted from the start of the job."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    """Images per second."""
    split: Split = field(default_factory=Split)
    """Where the time of the steps goes, in this world."""
    started: float = field(default_factory=time.perf_counter)
    """When this process began to build the training (time.perf_counter)."""

    @classmethod
    def of(cls, config: Config) -> Clocks:
        """Return clocks that start now, with the time limit as far as the job has used it up already."""
        passed = launcher.running_for(os.environ, processes.age_s())
        return cls(Timer(config.run.commit_seconds), Timer(config.run.max_seconds, passed=passed))


@dataclass(frozen=True)
class Arrival:
    """How this world came out of another one."""

    change: Change
    reported_at: float
    """When this rank reported how long it had waited until then (time.perf_counter)."""

    def seconds(self) -> float:
        """Return the seconds from the fault, or from the wish to change, until now."""
        return self.change.waited_s + time.perf_counter() - self.reported_at


@dataclass(frozen=True)
class Job:
    """A training in one world: what to do, with whom, with what, and how far it is."""

    config: Config
    world: World
    parts: Parts
    state: TrainState
    step: Step
    output: Output
    clocks: Clocks
    stop: StopSignal
    profile: Profile
    handover: Handover
    """Gives newcomers the state beside the steps."""
    share: Share
    """Which slots are this rank's."""
    arrival: Arrival | None
    """Reported to the user after the first step in this world; None in the first world of a training."""
