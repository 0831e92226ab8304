"""Running statistics of normalisation layers, kept equal on all ranks and independent of their number."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from hvd_train.world import Pending, World


class RunningStatistics:
    """After a step they are what they were before it plus the mean, over the step's slots, of each slot's change.

    Each slot starts from the same values, so neither the number of ranks nor the order of slots matters; what
    did not change (a frozen layer) stays as it was to the last bit. A fault in mid step loses nothing: `undo`.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [m for m in model.modules() if isinstance(m, (_BatchNorm, _InstanceNorm))]
        self._buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._before: list[Tensor] = []
        self._changes: list[Tensor] = []
        self._pending: Pending | None = None

    def begin(self) -> None:
        """A step begins."""
        self._before = [buffer.clone() for buffer in self._buffers]
        self._changes = [torch.zeros_like(buffer, dtype=torch.float32) for buffer in self._buffers]

    def begin_slot(self) -> None:
        """A slot's forward pass begins, and the backward pass of the one before is done: start from the same values.

        Not earlier: autograd refuses a backward pass whose layer had its statistics written to since.
        """
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)

    def end_slot(self) -> None:
        """A slot's forward pass is done: note the change."""
        for buffer, before, change in zip(self._buffers, self._before, self._changes, strict=True):
            change += buffer - before

    def start_sum(self, world: World) -> None:
        """This rank's last forward pass of the step is done: begin adding the changes over the ranks."""
        if self._buffers:
            flat = torch.cat([change.flatten() for change in self._changes])
            self._pending = world.start_sum(flat, "running_statistics")

    def finish(self, num_slots: int) -> None:
        """Wait for the sum over all `num_slots` slots of the step and apply its mean."""
        if self._pending is None:
            return
        mean = self._pending() / num_slots
        self._pending = None
        before_step, self._before = self._before, []
        parts = torch.split(mean, [buffer.numel() for buffer in self._buffers])
        for buffer, before, part in zip(self._buffers, before_step, parts, strict=True):
            change = part.view_as(buffer)
            buffer.copy_(before + (change if buffer.is_floating_point() else change.round().to(buffer.dtype)))

    def undo(self) -> None:
        """The step broke before its end: back to how it began."""
        self._pending = None
        for buffer, before in zip(self._buffers, self._before, strict=bool(self._before)):
            buffer.copy_(before)
