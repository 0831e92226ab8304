"""Normalisation layers over ranks: running statistics that are equal on all, and batch norm over all their samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from hvd_train.world.world import World


class RunningStatistics:
    """Moves the running statistics of a model's layers once a step, by the mean of what each slot changes in them.

    The slots of a step, on all ranks, start from the same values, so neither the number of ranks nor the order of slots
    matters. What no slot changes (a frozen layer) stays the same to the last bit. After a fault in the middle of a step
    `undo` brings back the values from before it.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [m for m in model.modules() if isinstance(m, (_BatchNorm, _InstanceNorm))]
        buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        # One call for all buffers of a kind: a ResNet-50 has 159, and each would be a kernel of its own on a GPU.
        self._means = _Buffers([buffer for buffer in buffers if buffer.is_floating_point()], torch.float32)
        self._counts = _Buffers([buffer for buffer in buffers if not buffer.is_floating_point()], torch.int64)
        self._kinds = [kind for kind in (self._means, self._counts) if kind.buffers]
        self._begun = False

    def begin(self) -> None:
        """Note the statistics at the beginning of a step."""
        for kind in self._kinds:
            torch._foreach_copy_(kind.before, kind.buffers)
            kind.change.zero_()
        self._begun = True

    def begin_slot(self) -> None:
        """Put back the statistics from the beginning of the step, before the forward pass of a slot.

        Called after the backward pass of the slot before: autograd refuses a backward pass through a layer whose
        statistics have been written to since its forward pass.
        """
        for kind in self._kinds:
            torch._foreach_copy_(kind.buffers, kind.before)

    def end_slot(self) -> None:
        """Add what the forward pass of a slot has changed to `changes`. Not called for a slot without samples."""
        for kind in self._kinds:
            torch._foreach_add_(kind.changes, torch._foreach_sub(kind.buffers, kind.before))

    @property
    def changes(self) -> list[Tensor]:
        """Return the summed changes of this rank's slots: one float32 tensor of one dimension for each kind."""
        return [kind.change for kind in self._kinds]

    def finish(self, total: Tensor, num_slots: int) -> None:
        """Apply the mean change of the `num_slots` slots of a step that has been taken.

        `total` is the sum over all ranks of `changes`, joined into one tensor of one dimension.
        """
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
        """Put back the statistics from the beginning of a step that is not taken, or was broken by a fault."""
        if self._begun:
            for kind in self._kinds:
                torch._foreach_copy_(kind.buffers, kind.before)


class _Buffers:
    """The buffers of one kind, their values before a step, and this rank's changes and the final step of each.

    `changes` and `steps` have one tensor for each buffer; these are views of `change` and `step`, one tensor of one
    dimension each, so that changes travel, and are divided, in one piece.
    """

    def __init__(self, buffers: list[Tensor], dtype: torch.dtype) -> None:
        self.buffers = buffers
        self.before = [torch.empty_like(buffer) for buffer in buffers]
        self.change, self.changes = _row(buffers, torch.float32)
        self.step, self.steps = _row(buffers, dtype)


def _row(buffers: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return zeros for all numbers of `buffers` as one tensor of one dimension, and a view of it for each buffer."""
    sizes = [buffer.numel() for buffer in buffers]
    row = torch.zeros(sum(sizes), dtype=dtype, device=buffers[0].device if buffers else None)
    return row, [part.view_as(buffer) for part, buffer in zip(torch.split(row, sizes), buffers, strict=True)]


def synchronised(model: nn.Module, world: World) -> nn.Module:
    """Return `model` with each batch norm layer replaced by one over the samples that all ranks have in a pass.

    Parameters and statistics are the same tensors as before. The model itself is changed, unless it is such a layer.
    """
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    for name, layer in layers:
        parent, _, own_name = name.rpartition(".")
        synchronised_layer = SyncBatchNorm(layer, SumOverRanks(world, f"batch_norm.{name}"))
        if not name:
            return synchronised_layer
        setattr(model.get_submodule(parent), own_name, synchronised_layer)
    return model


class SumOverRanks:
    """Sums tensors over the ranks of a world, which a deep copy shares: a model is copied with its layers."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def __call__(self, tensor: Tensor, name: str) -> Tensor:
        """Return the sum of `tensor` over all ranks. Raises RankLost."""
        return self._world.sum(tensor, f"{self._name}.{name}")

    def __deepcopy__(self, memo: object) -> SumOverRanks:
        return self


class SyncBatchNorm(_BatchNorm):
    """Batch norm (Ioffe and Szegedy, arXiv 1502.03167) over the samples of all ranks, on any device.

    In evaluation mode it is plain batch norm. In training every rank takes part in each forward and backward pass, with
    an empty batch where it has no samples.
    """

    def __init__(self, plain: _BatchNorm, add: SumOverRanks) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        for name, value in (*plain.named_parameters(recurse=False), *plain.named_buffers(recurse=False)):
            setattr(self, name, value)
        self.training = plain.training
        self._add = add

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # torch's name
        """Accept any number of dimensions."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Return the normalised `input` [n, features, ...].

        In training n may differ from rank to rank and be 0. Raises RankLost.
        """
        if not self.training:
            plain: Tensor = super().forward(input)
            return plain
        # Sums of squares of values far from zero would lose digits; the running mean is near to their centre.
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
        ctx: Any,
        images: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        centre: Tensor,
        eps: float,
        add: SumOverRanks,
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
        bias_gradient, weight_gradient = upper.sum(ctx.over), (upper * normal).sum(ctx.over)
        sums = ctx.add(torch.cat([bias_gradient, weight_gradient]), "backward").view(2, -1) / count
        mean, slope = (part.view(ctx.shape) for part in sums)
        image_gradient = (upper - mean - normal * slope) * inverse.view(ctx.shape)
        if weight is None:
            return image_gradient.to(gradient.dtype), None, None, None, None, None
        image_gradient = image_gradient * weight.float().view(ctx.shape)
        # Weight and bias get this rank's share of their gradients: it is summed with all other gradients.
        own_share = weight_gradient.to(weight.dtype), bias_gradient.to(weight.dtype)
        return image_gradient.to(gradient.dtype), *own_share, None, None, None
