"""Batch norm over the samples of all ranks; ranks without samples take part, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_train.errors import RankLost, UsageError
from hvd_train.world.world import World

_SHARED_NAME = "batch_norm"
Add = Callable[[Tensor, str], Tensor]


def synchronise(model: nn.Module, world: World) -> None:
    """Replace each batch norm layer by a SyncBatchNorm.

    Parameters and statistics are the same tensors.

    Raises UsageError for a layer with more than batch norm, as in many models of timm.
    """
    layers = [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)
    ]
    sums = SumsOfLayers(world, max((layer.num_features for _, layer in layers), default=0))
    for name, layer in layers:
        if type(layer).forward is not _BatchNorm.forward:
            raise UsageError(
                f"--sync-batch-norm: the layer {name} ({type(layer).__name__}) is "
                "not batch norm alone"
            )
        parent, _, own_name = name.rpartition(".")
        setattr(
            model.get_submodule(parent), own_name, SyncBatchNorm(layer, sums, f"batch_norm.{name}")
        )


class SumsOfLayers:
    """Sums over the ranks for all SyncBatchNorm layers of a model.

    A deep copy of a layer shares them.

    In the last pass of a step, a rank without a micro-batch does not run the model, which may not
    work without samples. It adds zeros until the other ranks report the end. All sums of such a
    pass have the same name and length.
    """

    mark: Callable[[str], None] = staticmethod(lambda phase: None)
    """Gives the time since its last call to a phase of the step."""
    lost: RankLost | None = None  # a fault in this step; from then on each sum is this rank's own

    def __init__(self, world: World, most_features: int = 0) -> None:
        """`most_features` is the largest number of features of a layer, 0 without layers."""
        self._world = world
        self._most_features = most_features
        # of all sums in a pass in which some ranks have no micro-batch
        self._length = 2 * most_features + 2
        # whether the last pass of this step has ranks without a micro-batch
        self._some_lack_one = False
        self._pads = False  # whether this rank's pass is that one
        self._alone = False

    def __call__(self, tensor: Tensor, name: str, phase: str) -> Tensor:
        """Return the sum of `tensor` over all ranks, in this phase of the step.

        After a fault it is this rank's own: an error would end the loop of the user's own, and the
        step is done again.
        """
        if self._alone or self.lost is not None:
            return tensor
        self.mark(phase)
        try:
            if not self._pads:
                return self._world.sum(tensor, name)
            row = tensor.new_zeros(self._length)
            row[: len(tensor)] = tensor
            row[-1] = 1  # more sums follow
            return self._world.sum(row, _SHARED_NAME)[: len(tensor)]
        except RankLost as error:
            self.lost = error
            return tensor
        finally:
            self.mark("reduction")

    def __deepcopy__(self, memo: object) -> SumsOfLayers:
        return self

    @property
    def is_used(self) -> bool:
        """Whether the model has such layers."""
        return self._most_features > 0

    def begin_step(self, num_mine: int, num_micro_batches: int) -> None:
        """Begin a step with these numbers of micro-batches, here and in all.

        Ranks take micro-batches in turn. If they do not divide evenly, some ranks have one more
        than the others.
        """
        self._full_passes, left = divmod(num_micro_batches, self._world.place.size)
        self._some_lack_one = self._most_features > 0 and left > 0
        self._pads = False
        self._num_mine = num_mine
        self.lost = None

    def begin_last_micro_batch(self) -> None:
        """Begin the last micro-batch of this rank."""
        self._pads = self._some_lack_one and self._num_mine > self._full_passes

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run passes that count for nothing inside this block, without other ranks."""
        self._alone = True
        yield
        self._alone = False

    def end_step(self, device: torch.device) -> None:
        """End the last micro-batch: release the ranks without one, or be one of them.

        Raises RankLost.
        """
        if self._some_lack_one:
            self._pads = False
            # The last number is above 0 until the ranks with a micro-batch report the end.
            while self._world.sum(torch.zeros(self._length, device=device), _SHARED_NAME)[-1] > 0:
                pass
            self.mark("reduction")


def sums_of_layers(model: nn.Module, world: World) -> SumsOfLayers:
    """Return the sums over ranks of the SyncBatchNorm layers of `model`."""
    return next(
        (layer.sums for layer in model.modules() if isinstance(layer, SyncBatchNorm)),
        SumsOfLayers(world),
    )


class SyncBatchNorm(_BatchNorm):
    """Batch norm (Ioffe and Szegedy, arXiv 1502.03167) over all ranks; all take
    part in each training pass.
    """

    def __init__(self, plain: _BatchNorm, sums: SumsOfLayers, name: str) -> None:
        super().__init__(
            plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats
        )
        for name, value in (
            *plain.named_parameters(recurse=False),
            *plain.named_buffers(recurse=False),
        ):
            setattr(self, name, value)
        self.training = plain.training
        self.sums = sums
        self._name = name

    def _add(self, tensor: Tensor, kind: str) -> Tensor:
        return self.sums(tensor, f"{self._name}.{kind}", kind)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # torch's name
        """Accept any number of dimensions."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Return the normalised `input` [n, features, ...]; in training n may differ by rank."""
        if not self.training:
            plain: Tensor = super().forward(input)
            return plain
        # Squares of values far from zero lose digits, so the running mean is subtracted first.
        centre = torch.zeros(self.num_features, device=input.device)
        if self.running_mean is not None:
            centre = self.running_mean.float().clone()
        output: Tensor
        output, mean, variance, count = _SyncBatchNorm.apply(
            input, self.weight, self.bias, centre, self.eps, self._add
        )
        if (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        ):
            self.num_batches_tracked.add_(1)
            share = (
                1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            )
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        return output


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        centre: Tensor,
        eps: float,
        add: Add,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape = (1, -1, *[1] * (x.dim() - 2))
        over = [0, *range(2, x.dim())]
        values = x.float() - centre.view(shape)
        number = torch.full((1,), float(values.numel() // values.shape[1]), device=x.device)
        sums = add(torch.cat([values.sum(over), values.square().sum(over), number]), "forward")
        count = sums[-1]
        mean, squares = sums[:-1].view(2, -1) / count
        variance = (squares - mean.square()).clamp(min=0)
        inverse = torch.rsqrt(variance + eps)
        normal = (values - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight, count)
        ctx.add = add
        ctx.over = over
        ctx.shape = shape
        output = normal if weight is None else normal * weight.float().view(shape)
        if bias is not None:
            output = output + bias.float().view(shape)
        statistics = (mean + centre, variance, count)
        ctx.mark_non_differentiable(*statistics)
        return output.to(x.dtype), *statistics

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        normal, inverse, weight, count = ctx.saved_tensors
        upper = gradient.float()
        bias_gradient = upper.sum(ctx.over)
        weight_gradient = (upper * normal).sum(ctx.over)
        sums = ctx.add(torch.cat([bias_gradient, weight_gradient]), "backward").view(2, -1) / count
        mean, slope = (part.view(ctx.shape) for part in sums)
        image_gradient = (upper - mean - normal * slope) * inverse.view(ctx.shape)
        if weight is None:
            return image_gradient.to(gradient.dtype), None, None, None, None, None
        image_gradient = image_gradient * weight.float().view(ctx.shape)
        # The gradients of weight and bias are this rank's share, which is summed with all other
        # gradients.
        own_share = weight_gradient.to(weight.dtype), bias_gradient.to(weight.dtype)
        return image_gradient.to(gradient.dtype), *own_share, None, None, None
