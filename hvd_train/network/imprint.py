"""What is left of gradients so that ranks can compare them: a digest and two numbers for each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn

from hvd_train.network.digest import digest_of

Gradients = Mapping[str, Tensor | None]
"""The gradient of each trained parameter by its name; None where the parameter has no part in the loss."""

_ROW = 1 << 16  # signs, which repeat after so many numbers of a gradient
_PIECE = 16 * _ROW  # numbers that are taken as float64 at once
_DEVIATIONS = 8  # a normal variable lies within so many of its standard deviations, but for a chance of 1e-15


def digests_of(gradients: Gradients) -> dict[str, str]:
    """Return a digest of each gradient by the name of its parameter: those of the same bits are equal."""
    return {
        name: digest_of("none" if gradient is None else "", [] if gradient is None else [("", gradient)])
        for name, gradient in gradients.items()
    }


def numbers_of(gradients: Gradients) -> Tensor:
    """Return the 2-norm of each gradient and its projection on fixed random signs, float64 [parameters, 2].

    A projection is the sum of all numbers of a gradient, each multiplied by +1 or -1.
    """
    numbers = [_numbers_of(gradient) for gradient in gradients.values() if gradient is not None]
    found = iter(torch.stack(numbers).cpu() if numbers else ())
    none = torch.zeros(2, dtype=torch.float64)
    return torch.stack([none if gradient is None else next(found) for gradient in gradients.values()])


def _numbers_of(gradient: Tensor) -> Tensor:
    """Return the norm and the projection of one gradient, float64 [2], on its device."""
    signs = _signs(gradient.device)
    squares, projection = torch.zeros(2, dtype=torch.float64, device=gradient.device)
    for piece in torch.split(gradient.detach().contiguous().reshape(-1), _PIECE):
        values = piece.double()
        whole = len(values) // _ROW * _ROW
        squares = squares + values.dot(values)
        projection = projection + torch.mv(values[:whole].view(-1, _ROW), signs).sum()
        projection = projection + values[whole:].dot(signs[: len(values) - whole])
    return torch.stack([squares.sqrt(), projection])


@cache
def _signs(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randint(2, (_ROW,), generator=generator) - 1).double().to(device)


def tolerance(model: nn.Module, precision: str, device: torch.device) -> float:
    """Return how far rounding may move a gradient, as a share of its norm, in the arithmetic of this precision.

    A number is rounded by a share of u at most: 2^-24 in fp32, 2^-11 in fp16 and in the TF32 that GPUs may take for
    fp32, 2^-8 in bf16. Where activations have kinks (ReLU, max pooling), a share of about u of those of a layer lies so
    near to one that rounding decides on which side, and each that changes sides takes its term of the gradient with it.
    These terms have random signs. So of d layers, there and back, the gradient moves by the root of 2 d u of its norm,
    which is more than the rounding of the sums themselves: u times the root of the number of additions.
    """
    bits = {"fp16": 11, "bf16": 8}.get(precision, 11 if device.type == "cuda" else 24)
    layers = sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())
    return math.sqrt(2 * max(1, layers) * 2.0**-bits)


def far_apart(mine: Tensor, theirs: Tensor, share: float) -> Tensor:
    """Return for which parameters two results of `numbers_of` differ by more than rounding explains, bool [parameters].

    `share` is that of `tolerance`. A gradient that is zero but for rounding (a bias before batch norm) has no digits in
    common with the same one elsewhere, so no norm counts as less than that of all gradients times `share`. What is
    not finite differs from all that is.
    """
    finite = torch.isfinite(mine).all(1), torch.isfinite(theirs).all(1)
    norms = torch.where(torch.stack(finite), torch.stack([mine[:, 0], theirs[:, 0]]), 0.0).amin(0)
    least = share * norms.norm()
    bound = _DEVIATIONS * share * norms.clamp(min=least)
    within = ((mine - theirs).abs() <= bound[:, None]).all(1)
    return ~torch.where(finite[0] & finite[1], within, finite[0] == finite[1])
