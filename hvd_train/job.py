"""What the loop works with: the parts of a run in one world, as one value."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_train.config import Config
from hvd_train.elastic.members import Change
from hvd_train.handover import Handover
from hvd_train.launch import launcher, processes
from hvd_train.output import Output
from hvd_train.parts import Parts
from hvd_train.profiling.profile import Profile
from hvd_train.progress.balance import Balance
from hvd_train.progress.clock import Lap, Split, Stopwatch, Timer
from hvd_train.progress.order import Share
from hvd_train.progress.slow_ranks import SlowRanks
from hvd_train.progress.stop import StopSignal
from hvd_train.rank_times import OwnTimes
from hvd_train.state import TrainState
from hvd_train.step import Steps
from hvd_train.suspicions import Suspicions
from hvd_train.world.world import World


@dataclass(frozen=True)
class Clocks:
    """What measures the time of a training on this rank."""

    commit_timer: Timer
    """Says when the last checkpoint is old enough for another one."""
    time_limit: Timer
    """Says when `--max-time` is over, counted from the start of the job."""
    check_timer: Timer = field(default_factory=lambda: Timer(None))
    """Says when the states of the ranks have not been compared for long enough."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    """Images per second."""
    lap: Lap = field(default_factory=Lap)
    """The time since the last step, or since the end of the last epoch, whichever came later."""
    split: Split = field(default_factory=Split)
    """Where the time of the steps goes, in this world."""
    started: float = field(default_factory=time.perf_counter)
    """When this process began to build the training (time.perf_counter)."""

    @classmethod
    def of(cls, config: Config) -> Clocks:
        """Return clocks that start now, with the time limit as far as the job has used it up already."""
        passed = launcher.running_for(os.environ, processes.age_s())
        return cls(
            commit_timer=Timer(config.run.commit_seconds),
            time_limit=Timer(config.run.max_seconds, passed=passed),
            check_timer=Timer(config.run.check_seconds),
        )


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
    steps: Steps
    output: Output
    clocks: Clocks
    stop: StopSignal
    profile: Profile
    handover: Handover
    """Gives newcomers the state beside the steps."""
    share: Share
    """Which slots are this rank's."""
    hosts: Sequence[str]
    """The host of each rank."""
    own_times: OwnTimes
    """What this rank is to tell the others of its time."""
    balance: Balance
    """How the slots are dealt over the ranks."""
    slow_ranks: SlowRanks
    """Says which ranks are slow, by what all tell."""
    suspicions: Suspicions
    """What is known of ranks that were wrong, and of their hosts."""
    arrival: Arrival | None
    """Reported to the user after the first step in this world; None in the first world of a training."""
