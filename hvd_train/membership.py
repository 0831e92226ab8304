"""Keep a training through changes of its ranks: reports, faults, and the transfer of the state."""

import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hvd_train.console import say
from hvd_train.data.trees import map_tensors
from hvd_train.elastic.members import Change, Member, RankReport, change_between
from hvd_train.errors import FaultRepeats, RankLost, ReplicasDiffer, counted, first_few
from hvd_train.network.buffers import tensors_in
from hvd_train.state import Label, Snapshot, TrainState, digest_of_snapshot
from hvd_train.world.wire import has_no_gaps
from hvd_train.world.world import Program, World

_QUIET_S = 3.0  # a shorter transfer is not worth a line
_SAME_STEP_FAULTS = 5  # a fault that repeats this often at one step is in the step, not in the cluster


class Membership:
    """The part of this process in the worlds of a training. Times are values of time.perf_counter."""

    def __init__(self) -> None:
        self.survives = False  # whether the state in memory is a state of this run, to be sent and committed
        self.run_dir: Path | None = None  # the run folder, once rank 0 has claimed one
        self.change: Change | None = None  # the one that led to this world
        self._member = Member(socket.gethostname(), os.getpid())
        self.members: tuple[Member, ...] = ()  # of the last world; empty before the first
        self._reason = ""  # why and when this rank left the last world
        self.left_at = 0.0
        self._broken_step = -1
        self._faults_in_row = 0

    def report(self, state: TrainState, waits: Label, state_at: Label, program: Program) -> RankReport:
        """Return the report of this rank for the other ranks."""
        return RankReport(
            self._member,
            survives=self.survives,
            step=state.progress.step,
            waits=waits,
            state_at=max(waits, state_at),
            digest=state.digest() if self.survives else "",
            reason=self._reason,
            run_dir=self.run_dir,
            session=len(program.begun),
            ended=program.ended[-1] if program.ended else None,
        )

    def join(self, before: tuple[Member, ...], reports: Sequence[RankReport], step: int) -> None:
        """Join these ranks after `step` steps; `before` are the members of the most advanced rank's last world."""
        self.survives = True
        self.members = tuple(report.member for report in reports)
        self.change = change_between(before, reports, step)
        if self.change is not None and self.change.left:
            self._faults_in_row = 0  # a rank that left explains the fault

    def leave(self, why: str) -> None:
        """Note that this rank leaves its world now, with the reason for the user."""
        self._reason = why
        self.left_at = time.perf_counter()

    def count_fault(self, error: RankLost, step: int) -> None:
        """Count a fault after `step` steps.

        Raises: FaultRepeats: if the same step fails for the fifth time in a row and no rank has left meanwhile.
        """
        self._faults_in_row = self._faults_in_row + 1 if self._broken_step == step else 1
        self._broken_step = step
        if self._faults_in_row == _SAME_STEP_FAULTS:
            line = f"step {step + 1} has failed {self._faults_in_row} times in a row; the last time: {error}"
            raise FaultRepeats(line) from error


def synchronize(state: TrainState, world: World, root: int, *, behind: bool = False) -> Snapshot | None:
    """Send the state of rank `root` to every other rank, which loads and returns it.

    A rank that is `behind` keeps its place.

    A rank receives the state into host memory and loads it after all ranks have compared digests. So after an error
    each rank still has its own state. Raises: RankLost: if another rank is lost; ReplicasDiffer: if a rank received
    something else than the root sent; UsageError: if the state belongs to another model or optimizer.
    """
    is_root = world.place.rank == root
    snapshot = map_tensors(state.live(), _without_gaps) if is_root else {}
    outline = map_tensors(snapshot, lambda tensor: torch.empty_like(tensor, device="meta"))
    outline = world.broadcast(outline, root)
    if not is_root:
        snapshot = map_tensors(outline, lambda tensor: torch.empty_like(tensor, device="cpu"))
    tensors = [tensor for _, tensor in tensors_in(snapshot)]
    size, ranks = sum(tensor.nbytes for tensor in tensors), counted(world.place.size - 1, "rank")
    notice = threading.Timer(_QUIET_S, say, [f"sending the state, {size / 1e6:,.0f} MB, to {ranks}"])
    if is_root:
        notice.start()
    try:
        world.broadcast_tensors(tensors, root)
    finally:
        notice.cancel()
    digests = world.gather(digest_of_snapshot(snapshot))
    if damaged := [rank for rank, digest in enumerate(digests) if digest != digests[root]]:
        raise ReplicasDiffer(f"the state of rank {root} arrived damaged on ranks {first_few(damaged)}")
    if is_root:
        return None
    state.load(snapshot, behind=behind)
    return snapshot


def _without_gaps(tensor: Tensor) -> Tensor:
    return tensor.detach() if has_no_gaps(tensor) else tensor.detach().contiguous()
