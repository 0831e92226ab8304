"""Gradients that are reduced in groups, by the hooks and private attributes of Horovod's optimizer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_train.world.wire import InMemoryOrder
from hvd_train.world.world import Reduction

Group = tuple[Tensor, ...]
StartSums = Callable[[Sequence[Tensor], str], int]
"""Begins to sum tensors in place over all ranks, under a name; returns Horovod's handle."""

_GROUP_BYTES = 25 * 2**20  # a group is sent while the gradients of the next are computed


class GroupedOptimizer:
    """Sends gradients in our groups by Horovod's hooks, and one more tensor with the first group.

    Horovod's constructor would broadcast the names in its groups, before the rendezvous of an elastic job. Its own
    grouped reduction supports neither Adasum nor factors, so groups are sent by `start_sums`. A hook on each parameter
    counts down its backward passes, then increments the count of its group, and sends the group if it is complete.
    """

    def __init__(
        self,
        horovod: Any,  # what `hvd.DistributedOptimizer` of Horovod 0.28.1 returns
        names: Mapping[Tensor, str],
        compression: InMemoryOrder,
        reduction: Reduction,
        start_sums: StartSums,
    ) -> None:
        self.horovod, self.reduction = horovod, reduction
        self._names, self._compression, self._start_sums = names, compression, start_sums
        self._piggybacked: Tensor | None = None
        horovod._grouped_allreduce_grad_async = self._send
        self.regroup()

    @property
    def reduces(self) -> bool:
        """Whether gradients are sent: not in a launched world of one."""
        return bool(self.horovod._requires_update)

    def regroup(self) -> None:
        """Make groups of the parameters that require a gradient now. Called between two steps."""
        parameters = [parameter for group in self.horovod.param_groups for parameter in group["params"]]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._piggybacked = None
        self._groups = fusion_groups(trained, self.reduction.groups)
        self.horovod._groups = self._groups
        self.horovod._p_to_group = {parameter: group for group in self._groups for parameter in group}
        self.horovod._group_counts = dict.fromkeys(self._groups, 0)
        self.horovod._requires_update = set(trained) if self.reduces else set()

    def expect_passes(self, passes: int) -> None:
        """Set the number of this rank's backward passes in the next step."""
        passes = max(1, passes)  # without any, `synchronize` sends all gradients
        if self.horovod.backward_passes_per_step != passes:
            self.horovod.set_backward_passes_per_step(passes)

    def piggyback(self, tensor: Tensor) -> None:
        """Send `tensor` with the first group of this step's gradients; after `synchronize` it holds the sum."""
        self._piggybacked = tensor

    def synchronize(self) -> None:
        """Send the other gradients, and wait until each one is the sum over all ranks.

        Horovod would send a group that lacks a gradient on this rank one parameter at a time, while other ranks send it
        whole. So missing gradients are filled with zeros here.
        """
        handles = self.horovod._handles
        for group in self._groups:
            if group not in handles:
                for parameter in group:
                    handles.pop(parameter, None)
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                handles[group] = self._send(group)
                self.horovod._group_counts[group] = 0
        self.horovod.synchronize()

    def forget_step(self) -> None:
        """Drop the handles of a broken step, for which the next step would wait."""
        self.horovod._handles.clear()
        self.horovod._group_counts.update(dict.fromkeys(self._groups, 0))
        self.horovod.set_backward_passes_per_step(self.horovod.backward_passes_per_step)

    def _send(self, group: Group) -> tuple[int, Sequence[Any]]:
        sent, contexts = zip(*[self._compression.compress(parameter.grad) for parameter in group], strict=True)  # type: ignore[arg-type]  # complete
        if group is self._groups[0] and self._piggybacked is not None:
            sent = (*sent, self._piggybacked)
        return self._start_sums(sent, self._names[group[0]]), contexts


def fusion_groups(parameters: Sequence[Tensor], count: int | None = None) -> list[Group]:
    """Return `parameters`, the last first, in `count` groups of similar size, or of about 25 MB."""
    sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in parameters}
    full = _GROUP_BYTES if count is None else math.ceil(sum(sizes.values()) / count)
    groups: list[list[Tensor]] = []
    size = full
    for parameter in reversed(parameters):
        if size >= full:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += sizes[parameter]
    return [tuple(group) for group in groups]
