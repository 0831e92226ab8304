"""One process's way through the worlds of a training: what it reports when ranks meet, and the steps that broke."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from hvd_train import remote_url
from hvd_train.elastic.members import Holds, Member, RankReport, change_between
from hvd_train.errors import FaultRepeats, RankLost
from hvd_train.handover import Handover
from hvd_train.job import Arrival
from hvd_train.launch import launcher, seat
from hvd_train.run_files import run_folder
from hvd_train.state import TrainState

_SAME_STEP_FAULTS = 5  # a fault that comes back as often at one step is in the step, not in the cluster


class Membership:
    """What this process has been through. Times are those of time.perf_counter."""

    def __init__(self, gpu: str = "") -> None:
        """`gpu` is the rank's GPU, as `device.gpu_identity` has it."""
        self._report = RankReport(
            Member(socket.gethostname(), os.getpid()), gpu=gpu, seat=seat.of_this_process(os.environ)
        )
        self._left_at = self._reported_at = 0.0
        self._broken_step, self._faults_in_row = -1, 0
        self._stay: IO[str] | None = None
        """Has another job wait for this process, which may be the last one with the steps that it has done."""

    @property
    def has_trained(self) -> bool:
        """Whether this process has been in a world of this training."""
        return self._report.has_trained

    @property
    def has_state(self) -> bool:
        """Whether the state in memory is one of all ranks after some step, so that it may be sent and committed."""
        return self._report.holds == "whole"

    @property
    def members(self) -> tuple[Member, ...]:
        """The process of each rank in the world that was joined last."""
        return self._report.previous_members

    @property
    def hosts(self) -> list[str]:
        """The host of each of them."""
        return [member.host for member in self.members]

    @property
    def run_dir(self) -> Path | None:
        """The run folder of the world that was joined last; None before, or where that has none."""
        return self._report.run_dir

    def report(self, state: TrainState, handover: Handover) -> RankReport:
        """Return what this rank says when all meet: how far it is, with which weights, and how long it has waited.

        `handover` is that of the world which it has left.
        """
        if not self.has_trained:
            return self._report
        # What comes from here on is counted by each rank itself: computing the digest, waiting for newcomers.
        self._reported_at = time.perf_counter()
        waited_s, progress = self._reported_at - self._left_at, state.progress
        has_all = self.has_state or handover.is_done
        return replace(
            self._report,
            epoch=progress.epoch,
            step=progress.step,
            digest=state.digest() if has_all else "",
            arrived=handover.arrived,
            waited_s=waited_s,
        )

    def distrust_state(self) -> None:
        """Note that survivors of one step have been found to differ, until all ranks have come to one state."""
        self._report = replace(self._report, holds="distrusted")

    def lose_state(self, run_dir: Path | None) -> None:
        """Note that another state is about to take the place of this rank's, until all of it is there and proven."""
        holds: Holds = "torn" if self._report.holds == "fresh" else self._report.holds
        self._report = replace(self._report, holds=holds, run_dir=run_dir)

    def join(
        self, reports: Sequence[RankReport], run_dir: Path | None, step: int, *, has_state: bool
    ) -> Arrival | None:
        """Take part in the world of these ranks, which go on after `step` steps; None where it is their first.

        Without `has_state` this rank is a newcomer that is given the state while the others train.
        """
        members = tuple(report.member for report in reports)
        self._report = replace(self._report, has_trained=True, previous_members=members, run_dir=run_dir)
        if has_state:
            self._report = replace(self._report, holds="whole")
        if run_dir is not None and self._stay is None and launcher.elastic(os.environ):
            self._stay = run_folder.stay(remote_url.working_folder(run_dir))
        change = change_between(reports, step)
        if change is not None and change.left:
            self._faults_in_row = 0  # that explains the fault: it was in the cluster
        return Arrival(change, self._reported_at) if change else None

    def close(self) -> None:
        """Let another job go on in the run folder: this process has nothing left to write."""
        if self._stay is not None:
            self._stay.close()

    def leave(self, why: str) -> None:
        """Note that this rank leaves its world now, and why, in words for the user."""
        self._left_at, self._report = time.perf_counter(), replace(self._report, reason=why)

    def count_fault(self, error: RankLost, step: int) -> None:
        """Count a fault after `step` steps.

        Raises FaultRepeats where the same step has broken again and again though nobody has left: no other world will
        do better.
        """
        self._faults_in_row = self._faults_in_row + 1 if self._broken_step == step else 1
        self._broken_step = step
        if self._faults_in_row == _SAME_STEP_FAULTS:
            raise FaultRepeats(
                f"step {step + 1} has failed {self._faults_in_row} times in a row; the last time: {error}"
            ) from error
