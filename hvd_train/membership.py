"""The report of one process for a rendezvous, and the faults that it has seen."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from hvd_train.elastic.members import Member, RankReport, change_between
from hvd_train.errors import FaultRepeats, RankLost
from hvd_train.job import Arrival
from hvd_train.launch import launcher
from hvd_train.run_files import run_folder
from hvd_train.state import TrainState

_SAME_STEP_FAULTS = 5  # a fault that repeats this often at one step is in the step, not in the cluster


class Membership:
    """The part of this process in the worlds of a training. Times are values of time.perf_counter."""

    def __init__(self) -> None:
        self.survives = False  # whether the state in memory is a state of this run, to be sent and committed
        self.run_dir: Path | None = None  # the run folder, once rank 0 has claimed one
        self._member = Member(socket.gethostname(), os.getpid())
        self._members: tuple[Member, ...] = ()  # of the last world
        self._reason = ""
        self._left_at = self._reported_at = 0.0
        self._broken_step, self._faults_in_row = -1, 0
        self._stay: IO[str] | None = None  # makes another job wait for this process, which may be the last survivor

    @property
    def has_trained(self) -> bool:
        """Whether this process has been in a world of this training."""
        return bool(self._members)

    @property
    def hosts(self) -> list[str]:
        """The host of each rank in the last world."""
        return [member.host for member in self._members]

    def report(self, state: TrainState) -> RankReport:
        """Return the report of this rank for the other ranks."""
        self._reported_at = time.perf_counter()  # each rank adds its own time since then (Arrival.seconds)
        return RankReport(
            self._member,
            has_trained=self.has_trained,
            survives=self.survives,
            epoch=state.progress.epoch,
            step=state.progress.step,
            digest=state.digest() if self.survives else "",
            previous_members=self._members,
            reason=self._reason,
            waited_s=self._reported_at - self._left_at if self.has_trained else 0.0,
            run_dir=self.run_dir,
        )

    def join(self, reports: Sequence[RankReport], step: int) -> Arrival | None:
        """Join these ranks after `step` steps; return None if no rank has trained."""
        self.survives = True
        self._members = tuple(report.member for report in reports)
        if self.run_dir is not None and self._stay is None and launcher.elastic(os.environ):
            self._stay = run_folder.stay(self.run_dir)
        change = change_between(reports, step)
        if change is not None and change.left:
            self._faults_in_row = 0  # a rank that left explains the fault
        return Arrival(change, self._reported_at) if change else None

    def leave(self, why: str) -> None:
        """Note that this rank leaves its world now, with the reason for the user."""
        self._left_at, self._reason = time.perf_counter(), why

    def count_fault(self, error: RankLost, step: int) -> None:
        """Count a fault after `step` steps.

        Raises: FaultRepeats: if the same step fails for the fifth time in a row and no rank has left meanwhile.
        """
        self._faults_in_row = self._faults_in_row + 1 if self._broken_step == step else 1
        self._broken_step = step
        if self._faults_in_row == _SAME_STEP_FAULTS:
            line = f"step {step + 1} has failed {self._faults_in_row} times in a row; the last time: {error}"
            raise FaultRepeats(line) from error

    def close(self) -> None:
        """Let another job use the run folder: this process has nothing left to write."""
        if self._stay is not None:
            self._stay.close()
