"""A few numbers tell the gradients of one computation from those of another, and rounding from a fault."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hvd_train.network.imprint import Gradients, digests_of, far_apart, numbers_of, tolerance
from tests.support.worlds import own_generator

CPU = torch.device("cpu")
SHARE = 1e-3


def gradients(*shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {str(number): torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}


def test_the_numbers_do_not_depend_on_the_layout_in_memory() -> None:
    """A gradient in channels_last has those of the same one in the usual order; both are in float64."""
    found = gradients((64, 32, 3, 3), (70000,), (3, 0), ())
    last = {**found, "0": found["0"].to(memory_format=torch.channels_last)}
    numbers = numbers_of(found)
    assert torch.equal(numbers_of(last), numbers)
    assert digests_of(last) == digests_of(found)
    assert numbers[:, 0].tolist() == pytest.approx([float(g.double().norm()) for g in found.values()], rel=1e-14)


@pytest.mark.parametrize("place", [0, 65535, 65536, 1048575, 1048577, 1100000])
def test_one_number_that_changes_its_sign_is_seen(place: int) -> None:
    """The norm does not show it; the projection does, wherever it is."""
    found = gradients((1100001,))
    other = {"0": found["0"].clone()}
    other["0"][place] *= -1
    mine, theirs = numbers_of(found), numbers_of(other)
    assert float(mine[0, 0]) == pytest.approx(float(theirs[0, 0]), rel=1e-14)
    assert float((mine - theirs)[0, 1].abs()) == pytest.approx(2 * float(found["0"][place].abs()), rel=1e-6)


def test_a_parameter_without_a_gradient_is_none_of_zeros() -> None:
    """It has the numbers of one, but another digest."""
    zeros: Gradients = {"a": torch.zeros(3), "b": torch.ones(2)}
    none: Gradients = {**zeros, "a": None}
    assert torch.equal(numbers_of(zeros), numbers_of(none))
    assert digests_of(zeros)["a"] != digests_of(none)["a"]
    assert torch.equal(numbers_of({"a": None}), torch.zeros(1, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("mine", "theirs", "far"),
    [
        ((1.0, 0.5), (1.0, 0.5 + 7 * SHARE), False),
        ((1.0, 0.5), (1.0, 0.5 + 9 * SHARE), True),
        ((1.0, 0.5), (1.0 + 9 * SHARE, 0.5), True),
        ((1.0, 0.5), (1e30, 1e29), True),
        ((1e30, 1e29), (1.0, 0.5), True),
        ((1.0, 0.5), (math.nan, math.nan), True),
        ((1.0, 0.5), (math.inf, 0.5), True),
        ((math.nan, 0.5), (math.inf, 0.5), False),
        ((1e-5, 1e-5), (1e-6, -1e-6), True),
        ((1e-6, 1e-6), (1e-7, -1e-7), False),
    ],
)
def test_what_rounding_explains(mine: tuple[float, float], theirs: tuple[float, float], far: bool) -> None:
    """Eight deviations of a share of the norm, which counts as no less than a share of that of all gradients."""
    both = [torch.tensor([(1.0, 0.3), numbers], dtype=torch.float64) for numbers in (mine, theirs)]
    assert far_apart(*both, SHARE).tolist() == [False, far]


def network() -> nn.Module:
    """Return a network with kinks, and with a bias whose gradient is zero but for rounding."""
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return own_generator(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)))


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_order_of_additions_is_within_the_bound(dtype: torch.dtype) -> None:
    """The samples of a slot in another order give the same gradients but for rounding; a tenth more is a fault."""
    model, images = network(), torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    names, parameters = zip(*model.named_parameters(), strict=True)

    def found(order: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype, dtype != torch.float32):
            loss = nn.functional.cross_entropy(model(images[order]), order % 10)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    mine, theirs = found(torch.arange(16)), found(torch.arange(15, -1, -1))
    share = tolerance(model, "fp32" if dtype == torch.float32 else "bf16", CPU)
    assert digests_of(mine) != digests_of(theirs)
    assert not far_apart(numbers_of(mine), numbers_of(theirs), share).any()
    if dtype == torch.float32:
        wrong = {**theirs, "4.weight": theirs["4.weight"] * 1.1}
        assert far_apart(numbers_of(mine), numbers_of(wrong), share).nonzero().tolist() == [[4]]
