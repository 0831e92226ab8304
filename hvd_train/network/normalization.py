"""Batch norm over the samples of all ranks, and how a rank without samples takes part in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_train.world.world import World


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

    padded: int | None = None
    """The length of all sums in a pass that some ranks have no micro-batch in, else None."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def __call__(self, tensor: Tensor, name: str) -> Tensor:
        """Return the sum of `tensor` over all ranks. Raises RankLost."""
        if self.padded is None:
            return self._world.sum(tensor, f"{self._name}.{name}")
        summed = self._world.sum(_padded(tensor, self.padded), _SHARED_NAME)
        return summed[: len(tensor)]

    def __deepcopy__(self, memo: object) -> SumOverRanks:
        return self


_SHARED_NAME = "batch_norm"


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Return `tensor` with zeros after it, and a 1 at the end: there is more to come."""
    row = tensor.new_zeros(length)
    row[: len(tensor)] = tensor
    row[-1] = 1
    return row


class SumsInPasses:
    """The sums of a model's layers over ranks in each pass, also for ranks without a micro-batch in it.

    Ranks take micro-batches in turn, so a rank may lack one in the last pass of a step only. It does not run the model,
    which need not work without samples (`x.view(len(x), -1)`). It adds zeros to the sums of the others
    until these report the end. In such a pass all sums have the same name and length, so no rank needs to know
    which comes next. Without such layers nothing is summed.
    """

    def __init__(self, sums: Sequence[SumOverRanks], longest: int, world: World, device: torch.device) -> None:
        """`longest` is the length of the longest sum of a layer."""
        self._sums, self._length, self._world, self._device = sums, longest + 1, world, device
        self._some_lack_one = self._lacks_one = False

    def begin_step(self, num_mine: int, num_micro_batches: int) -> None:
        """Begin a step with this number of micro-batches on this rank and on all ranks."""
        full_passes, left = divmod(num_micro_batches, self._world.place.size)
        self._some_lack_one = bool(self._sums) and left > 0
        self._lacks_one = self._some_lack_one and num_mine == full_passes
        self._pad(None)

    def begin_last_micro_batch(self) -> None:
        """Begin the last micro-batch of this rank."""
        if self._some_lack_one and not self._lacks_one:
            self._pad(self._length)

    def end_step(self) -> None:
        """End the last micro-batch: release the ranks without one, or be one of them. Raises RankLost."""
        if self._some_lack_one:
            self._pad(None)
            while self._sum_zeros()[-1] > 0:  # 1 until the ranks with a micro-batch report the end
                pass

    def _sum_zeros(self) -> Tensor:
        return self._world.sum(torch.zeros(self._length, device=self._device), _SHARED_NAME)

    def _pad(self, length: int | None) -> None:
        for each in self._sums:
            each.padded = length


def sums_in_passes(model: nn.Module, world: World, device: torch.device) -> SumsInPasses:
    """Return what the layers of `model`, which is on `device`, sum over the ranks of `world`."""
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    longest = max((2 * layer.num_features + 1 for layer in layers), default=0)
    return SumsInPasses([layer.add for layer in layers], longest, world, device)


class SyncBatchNorm(_BatchNorm):
    """Batch norm (Ioffe and Szegedy, arXiv 1502.03167) over the samples of all ranks, on any device.

    In evaluation mode it is plain batch norm. In training every rank takes part in each forward and backward pass:
    with samples, with an empty batch, or without the layer (`SumsInPasses`).
    """

    def __init__(self, plain: _BatchNorm, add: SumOverRanks) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        for name, value in (*plain.named_parameters(recurse=False), *plain.named_buffers(recurse=False)):
            setattr(self, name, value)
        self.training = plain.training
        self.add = add

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
        output, mean, variance, count = _SyncBatchNorm.apply(input, self.weight, self.bias, centre, self.eps, self.add)
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
