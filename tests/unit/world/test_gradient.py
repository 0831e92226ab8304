"""A rank's own gradient: its norm, read with the numbers that travelled, and its step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hvd_train.world.gradient import OwnGradient


def optimizer_of(*gradients: list[float] | None) -> torch.optim.SGD:
    """Return plain SGD over parameters of ones with these gradients."""
    parameters = [torch.ones(3, requires_grad=True) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    return torch.optim.SGD(parameters, lr=0.5)


def test_numbers_and_norm_are_read_together() -> None:
    """The norm is that of all gradients there are, as of one vector."""
    gradient = OwnGradient(optimizer_of([3.0, 0.0, 0.0], None, [0.0, 4.0, 12.0]))
    numbers, norm = gradient.read(torch.tensor([1.5, 2.0]))
    assert numbers == [1.5, 2.0]
    assert norm == pytest.approx(13.0, rel=6 * 2**-24)  # of six squares, each rounded


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_shows_in_the_norm(value: float) -> None:
    """So that the step is skipped."""
    _, norm = OwnGradient(optimizer_of([1.0, value, 0.0])).read(torch.zeros(1))
    assert not math.isfinite(norm)


@pytest.mark.parametrize(("factor", "weight"), [(None, 0.0), (0.5, 0.5)])
def test_a_step_by_a_part_of_it(factor: float | None, weight: float) -> None:
    """A factor scales the gradient, and with it the step of plain SGD."""
    optimizer = optimizer_of([2.0, 2.0, 2.0])
    OwnGradient(optimizer).take_step(factor)
    assert optimizer.param_groups[0]["params"][0].tolist() == [weight] * 3


@pytest.mark.parametrize("shape", [(2**22,), (2**12, 2**10), (2**4, 2**18)])
def test_the_norm_of_a_large_gradient_loses_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Added up in float32 one by one, ones beyond 2 ** 24 would not count: it is taken of pieces with less."""
    sizes: list[int] = []
    norm_of = torch._foreach_norm

    def recorded(pieces: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        sizes.extend(piece.numel() for piece in pieces)
        return norm_of(pieces)

    monkeypatch.setattr(torch, "_foreach_norm", recorded)
    parameter = nn.Parameter(torch.ones(()).expand(shape))  # one number in memory
    parameter.grad = parameter.detach()
    _, norm = OwnGradient(torch.optim.SGD([parameter], lr=1.0)).read(torch.zeros(1))
    assert norm == 2**11
    assert sum(sizes) == 2**22
    assert max(sizes) <= 2**18
