"""Normalisation layers over ranks: running statistics that are equal on all, and batch norm over all their samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from hvd_train.world.world import World


class RunningStatistics:
    """After a step they are what they were before it plus the mean, over the step's slots, of each slot's change.

    Each slot starts from the same values, so neither the number of ranks nor the order of slots matters; what
    did not change (a frozen layer) stays as it was to the last bit. A fault in mid step loses nothing: `undo`.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [m for m in model.modules() if isinstance(m, (_BatchNorm, _InstanceNorm))]
        buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        # One call for all of a kind: a ResNet-50 has 159 of them, and each is a kernel of its own on a GPU else.
        self._means = _Buffers([buffer for buffer in buffers if buffer.is_floating_point()], torch.float32)
        self._counts = _Buffers([buffer for buffer in buffers if not buffer.is_floating_point()], torch.int64)
        self._kinds = [kind for kind in (self._means, self._counts) if kind.buffers]
        self._begun = False

    def begin(self) -> None:
        """A step begins."""
        for kind in self._kinds:
            torch._foreach_copy_(kind.before, kind.buffers)
            kind.change.zero_()
        self._begun = True

    def begin_slot(self) -> None:
        """A slot's forward pass begins, and the backward pass of the one before is done: start from the same values.

        Not earlier: autograd refuses a backward pass whose layer had its statistics written to since.
        """
        for kind in self._kinds:
            torch._foreach_copy_(kind.buffers, kind.before)

    def end_slot(self) -> None:
        """The forward pass of a slot, which had samples, is done: note the change."""
        for kind in self._kinds:
            torch._foreach_add_(kind.changes, torch._foreach_sub(kind.buffers, kind.before))

    @property
    def changes(self) -> list[Tensor]:
        """Those of this rank's slots, float32 in rows: they are to be added over the ranks."""
        return [kind.change for kind in self._kinds]

    def finish(self, total: Tensor, num_slots: int) -> None:
        """The step is taken: apply the mean over its `num_slots` slots; `total`: all changes of all ranks in a row."""
        self._begun = False
        if not self._kinds:
            return
        parts = torch.split(total, [len(kind.change) for kind in self._kinds])
        for kind, part in zip(self._kinds, parts, strict=True):
            mean = part / num_slots
            kind.step.copy_(mean.round() if kind is self._counts else mean)
            torch._foreach_add_(kind.before, kind.steps)
            torch._foreach_copy_(kind.buffers, kind.before)

    def undo(self) -> None:
        """The step is not taken, or broke before its end: back to how it began."""
        if self._begun:
            for kind in self._kinds:
                torch._foreach_copy_(kind.buffers, kind.before)


class _Buffers:
    """Buffers of one kind, what they were before a step, the changes of this rank's slots, and the step of them all.

    Changes and steps are views of one row of numbers each, so that they travel and are divided in one piece.
    """

    def __init__(self, buffers: list[Tensor], dtype: torch.dtype) -> None:
        self.buffers = buffers
        self.before = [torch.empty_like(buffer) for buffer in buffers]
        self.change, self.changes = _row(buffers, torch.float32)
        self.step, self.steps = _row(buffers, dtype)


def _row(buffers: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """As many numbers in one piece, and the part of each buffer in its shape."""
    sizes = [buffer.numel() for buffer in buffers]
    row = torch.zeros(sum(sizes), dtype=dtype, device=buffers[0].device if buffers else None)
    return row, [part.view_as(buffer) for part, buffer in zip(torch.split(row, sizes), buffers, strict=True)]


def synchronised(model: nn.Module, world: World) -> nn.Module:
    """The model with each batch norm in it over the samples that all ranks have in the same pass; weights stay."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    for name, layer in layers:
        parent, _, own_name = name.rpartition(".")
        synchronised_layer = SyncBatchNorm(layer, Summing(world, f"batch_norm.{name}"))
        if not name:
            return synchronised_layer
        setattr(model.get_submodule(parent), own_name, synchronised_layer)
    return model


class Summing:
    """Adds over the ranks of a world. A model is copied with its layers, a world is not."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def __call__(self, tensor: Tensor, what: str) -> Tensor:
        """The sum over all ranks. Raises RankLost."""
        return self._world.sum(tensor, f"{self._name}.{what}")

    def __deepcopy__(self, memo: object) -> Summing:
        return self


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the samples of all ranks (Ioffe and Szegedy, arXiv 1502.03167), on any device.

    In evaluation, and where no ranks take part, it is the plain one. Every rank comes to each forward and backward
    pass, without samples (an empty batch) if need be.
    """

    def __init__(self, plain: _BatchNorm, add: Summing) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        for name, value in (*plain.named_parameters(recurse=False), *plain.named_buffers(recurse=False)):
            setattr(self, name, value)
        self.training = plain.training
        self._add = add

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # torch's name
        """Any number of dimensions."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Input [n, features, ...], of which n may be 0 and another one on each rank."""
        if not self.training:
            plain: Tensor = super().forward(input)
            return plain
        # Sums of squares of what is nearly centred lose no digits.
        centre = torch.zeros(self.num_features, device=input.device)
        if self.running_mean is not None:
            centre = self.running_mean.float().clone()
        output, mean, variance, count = _SyncBatchNorm.apply(input, self.weight, self.bias, centre, self.eps, self._add)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        result: Tensor = output
        return result


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor | None, bias: Tensor | None, centre: Tensor, eps: float, add: Summing
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape = (1, -1, *[1] * (images.dim() - 2))
        over = [0, *range(2, images.dim())]
        values = images.float() - centre.view(shape)
        number = torch.full((1,), float(values.numel() // values.shape[1]), device=images.device)
        sums = add(torch.cat([values.sum(over), values.square().sum(over), number]), "forward")
        count = sums[-1]
        mean, squares = sums[:-1].view(2, -1) / count
        variance = (squares - mean.square()).clamp(min=0)
        inverse = torch.rsqrt(variance + eps)
        normal = (values - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight, count)
        ctx.add, ctx.over, ctx.shape = add, over, shape
        output = normal if weight is None else normal * weight.float().view(shape)
        if bias is not None:
            output = output + bias.float().view(shape)
        statistics = (mean + centre, variance, count)
        ctx.mark_non_differentiable(*statistics)
        return output.to(images.dtype), *statistics

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        normal, inverse, weight, count = ctx.saved_tensors
        upper = gradient.float()
        of_bias, of_weight = upper.sum(ctx.over), (upper * normal).sum(ctx.over)
        sums = ctx.add(torch.cat([of_bias, of_weight]), "backward").view(2, -1) / count
        mean, slope = (part.view(ctx.shape) for part in sums)
        of_images = (upper - mean - normal * slope) * inverse.view(ctx.shape)
        if weight is None:
            return of_images.to(gradient.dtype), None, None, None, None, None
        of_images = of_images * weight.float().view(ctx.shape)
        # Of the weights only this rank's share: they are summed with all other gradients.
        return of_images.to(gradient.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None
