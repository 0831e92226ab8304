"""Gradients that are reduced in groups, by the hooks and private attributes of Horovod's optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from hvd_train.errors import RankLost
from hvd_train.world.gradient import Gradient, OwnGradient
from hvd_train.world.shared_weights import SharedGradient, SharedWeights
from hvd_train.world.wire import GroupCompression
from hvd_train.world.world import Reduction

Group = tuple[Tensor, ...]
StartSums = Callable[[Sequence[Tensor], str], int]
"""Begins to sum several tensors in place over all ranks, under a name; returns Horovod's handle for all of them."""

# One group of about this size travels while the gradients of the next are computed.
_GROUP_BYTES = 25 * 2**20
# Nothing is left to compute while the last one travels.
_LAST_BYTES = 4 * 2**20
_PUT_BYTES = 2**20  # what is put into shared memory at once: it is still in the cache then


class HorovodOptimizer(Protocol):
    """What `GroupedOptimizer` relies on in the optimizer that `hvd.DistributedOptimizer` of Horovod 0.28.1 returns.

    No other module touches a private attribute of Horovod. A unit test compares this list with the installed Horovod.
    A hook on each parameter counts down its backward passes; after the last one it adds 1 to the count of the
    parameter's group, and calls `_grouped_allreduce_grad_async` where that makes the group complete.
    """

    param_groups: list[dict[str, Any]]
    backward_passes_per_step: int

    _requires_update: set[Tensor]
    """The parameters whose gradients `synchronize` waits for. Empty in a world of one: Horovod has no hooks there."""
    _groups: list[Group] | None
    """None has each hook reduce its own gradient; anything else, whole groups."""
    _p_to_group: dict[Tensor, Group]
    """The group of each parameter."""
    _group_counts: dict[Group, int]
    """How many parameters of a group have all gradients of this step."""
    _handles: dict[Any, tuple[int | None, Any]]
    """What has been sent in this step, by group (by parameter: a hook whose group is not complete), with its handle."""
    _grouped_allreduce_grad_async: Callable[[Group], tuple[int | None, Sequence[Any]]]
    """Begins to reduce a group; returns the handle, and for each sum of gradients what its `decompress` needs."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Have the hooks send gradients after so many backward passes, counted from here."""

    def synchronize(self) -> None:
        """Wait for all reductions, and give the gradients what `decompress` returns for the sums of their group.

        Where a group has fewer sums, its first parameters alone get one, and have their backward passes counted anew.
        """

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Inside this block `step` does not synchronize again."""


class GroupedOptimizer:
    """Has the hooks of a Horovod optimizer send gradients by groups of our making, with a tensor of ours among them.

    Groups are not passed to Horovod's constructor, since it broadcasts the names of their parameters: in an elastic job
    the ranks need not have met yet. They are sent by `start_sums`, as Horovod's own way knows neither Adasum nor
    factors for groups.
    """

    def __init__(
        self,
        horovod: HorovodOptimizer,
        names: Mapping[Tensor, str],
        compression: GroupCompression,
        reduction: Reduction,
        start_sums: StartSums,
        wait_for_sums: Callable[[int], object],
    ) -> None:
        self.horovod = horovod
        self.reduction = reduction
        self._names = names
        self._compression = compression
        self._start_sums, self._wait_for_sums = start_sums, wait_for_sums
        self._piggybacked: Tensor | None = None
        self._shared: SharedWeights | None = None
        self._announcement: int | None = None
        horovod._grouped_allreduce_grad_async = self._send
        self.regroup()

    @property
    def reduces(self) -> bool:
        """Whether gradients travel at all; they do not in a launched world of one."""
        return bool(self.horovod._requires_update)

    def regroup(self) -> None:
        """Make groups of the parameters that require a gradient now. Called between two steps."""
        parameters = [parameter for group in self.horovod.param_groups for parameter in group["params"]]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._piggybacked = None
        if self._shared is None:
            self._groups = fusion_groups(trained, self.reduction.groups)
        else:
            self._shared.cut(trained)
            self._groups = fusion_groups(trained, full=_PUT_BYTES)
        self.horovod._groups = self._groups
        self.horovod._p_to_group = {parameter: group for group in self._groups for parameter in group}
        self.horovod._group_counts = dict.fromkeys(self._groups, 0)
        self.horovod._requires_update = set(trained) if self.reduces else set()

    def expect_passes(self, passes: int) -> None:
        """Set how many backward passes this rank makes in the next step; without any it joins in `synchronize`."""
        passes = max(1, passes)
        if self.horovod.backward_passes_per_step != passes:
            self.horovod.set_backward_passes_per_step(passes)

    @property
    def gradient(self) -> Gradient:
        """The gradient of this step, after `synchronize`."""
        if self._shared is not None:
            return SharedGradient(self._shared)
        return OwnGradient(self.horovod)  # type: ignore[arg-type]  # it is an Optimizer, too

    @property
    def can_share(self) -> bool:
        """Whether gradients are summed as they are, so that it makes no difference by which way."""
        plain = self.reduction.wire is None and not self.reduction.adasum and self.reduction.predivide == 1
        return plain and self.reduces

    def share(self, weights: SharedWeights) -> None:
        """Put gradients into the memory that the ranks of this host share, from the next step on."""
        self._shared = weights
        self.regroup()

    def part(self) -> None:
        """Have weights and optimizer state of this rank's own again, between two steps or after a broken one."""
        if self._shared is not None:
            self._shared.move_out()
            self._shared = None
            self.regroup()

    def piggyback(self, tensor: Tensor) -> None:
        """Send `tensor` with the first group of this step's gradients; after `synchronize` it holds the sum.

        For a reduction of its own all ranks would have to agree once more in each step.
        """
        self._piggybacked = tensor

    def synchronize(self) -> None:
        """Send what the hooks have not sent, and wait until each gradient is the sum over all ranks.

        Left to itself Horovod would send a group that lacks a gradient on this rank one parameter at a time, while
        ranks that have all its gradients send it whole. So missing gradients are filled with zeros here.
        """
        handles = self.horovod._handles
        for group in self._groups:
            if group not in handles:
                for parameter in group:
                    handles.pop(parameter, None)
                handles[group] = self._send(group)
                self.horovod._group_counts[group] = 0
        if self._shared is None:
            self.horovod.synchronize()
            self._count_passes_anew()
        else:
            self._sum_with_host(self._shared)

    def _sum_with_host(self, shared: SharedWeights) -> None:
        """Wait until all ranks have put all of their gradients, which what travels says, and sum this rank's shard."""
        try:
            self._wait_for_sums(self._announced())
        except RankLost:
            shared.break_off()
            raise
        self.forget_step()
        shared.sum()

    def _announced(self) -> int:
        """Send what travels with this step, unless it is under way, and return its handle."""
        if self._announcement is None:
            words = torch.zeros(1) if self._piggybacked is None else self._piggybacked
            self._announcement = self._start_sums([words], "hvd_train.step")
        return self._announcement

    def forget_step(self) -> None:
        """Drop what a broken step has left: its reductions ended with the fault, and the next step would wait."""
        self._announcement = None
        self.horovod._handles.clear()
        self.horovod._group_counts.update(dict.fromkeys(self._groups, 0))
        self._count_passes_anew()

    def _count_passes_anew(self) -> None:
        self.horovod.set_backward_passes_per_step(self.horovod.backward_passes_per_step)

    def _send(self, group: Group) -> tuple[int | None, Sequence[Any]]:
        if self._shared is not None:
            self._shared.put(group)
            if all(other in self.horovod._handles for other in self._groups if other is not group):
                self._announced()
            return None, ()
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in group if parameter.grad is not None]  # all of them
        sent, contexts = self._compression.compress(gradients)
        if group is self._groups[0] and self._piggybacked is not None:
            sent = (*sent, self._piggybacked)
        return self._start_sums(sent, self._names[group[0]]), contexts


def fusion_groups(parameters: Sequence[Tensor], count: int | None = None, full: int = _GROUP_BYTES) -> list[Group]:
    """Return `parameters` in at most `count` groups of about the same size, or in groups of about `full` bytes.

    The order is more or less that in which a backward pass reaches them: the last parameter comes first. Without a
    number the last group has 4 MB at most, if its parameters are not larger.
    """
    sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in parameters}
    if count is not None:
        full = math.ceil(sum(sizes.values()) / count)
    groups: list[list[Tensor]] = []
    size = full
    for parameter in reversed(parameters):
        if size >= full:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += sizes[parameter]
    if groups and count is None:
        small = _small_end([sizes[parameter] for parameter in groups[-1]])
        if 0 < small < len(groups[-1]):
            groups[-1:] = [groups[-1][:-small], groups[-1][-small:]]
    return [tuple(group) for group in groups]


def _small_end(sizes: Sequence[int]) -> int:
    """Return how many of the last sizes are no more than the last group's together."""
    return sum(end <= _LAST_BYTES for end in accumulate(reversed(sizes)))
