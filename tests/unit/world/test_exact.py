"""Exact sums of gradients, against sums of fractions."""

import math
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hvd_train.errors import SumsOverflow
from hvd_train.world.exact import ExactSums
from hvd_train.world.world import LocalWorld
from tests.support.worlds import run_ranks

FLOATS = st.floats(-1e6, 1e6, width=32)
ROWS = st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=9)


def summed(
    sums: ExactSums, parameters: dict[str, nn.Parameter], passes: list[dict[str, Tensor]], of: int
) -> dict[str, Tensor | None]:
    """Return the gradients by name, summed over passes, after as many attempts as it takes."""
    known = dict(sums.exponents)
    for _ in range(3):
        sums.begin("", parameters, of, known)
        for gradients in passes:
            for name, parameter in parameters.items():
                given = gradients.get(name)
                parameter.grad = None if given is None else given.clone()
            sums.end_pass()
        sums.start()
        try:
            sums.reduce()
        except SumsOverflow:
            continue
        return {name: parameter.grad for name, parameter in parameters.items()}
    raise AssertionError("three attempts overflow")


def sum_of(passes: list[dict[str, Tensor]]) -> Tensor:
    return summed(ExactSums(LocalWorld()), {"x": parameter_of(3)}, passes, len(passes))["x"]


def parameter_of(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


@given(ROWS, st.randoms(use_true_random=False))
def test_a_sum_is_as_good_as_one_of_float32_in_any_order(
    rows: list[list[float]], random: Random
) -> None:
    """Against the error bound of a sum in float32 (Higham, chapter 4), for its largest number."""
    gradients = torch.tensor(rows)
    passes = [{"x": row} for row in gradients]
    result = sum_of(passes)
    exact = [sum(map(Fraction, column)) for column in gradients.double().T.tolist()]
    magnitude = float(gradients.double().abs().sum(0).max())
    bound = max(1, len(rows) - 1) * 2.0**-24 * magnitude + 2.0**-149
    for number, true in zip(result.double().tolist(), exact, strict=True):
        assert abs(Fraction(number) - true) <= bound
    random.shuffle(passes)
    assert torch.equal(sum_of(passes), result)


def test_ranks_get_the_bits_of_one_rank() -> None:
    """Also if a rank has no micro-batch, and for a gradient that grows by 2^20."""
    generator = torch.Generator().manual_seed(0)
    passes = [
        {"x": torch.randn(5, 4, generator=generator) * 2.0 ** (5 * number)} for number in range(4)
    ]

    def body(world):
        sums = ExactSums(world)
        mine = passes[world.place.rank :: world.place.size]
        found = []
        for growth in (1.0, 2.0**20):
            grown = [{"x": each["x"] * growth} for each in mine]
            found.append(summed(sums, {"x": parameter_of(5, 4)}, grown, 4)["x"].clone())
        return torch.stack(found)

    (alone,) = run_ranks(1, body)
    for size in (2, 3, 5):
        assert all(torch.equal(found, alone) for found in run_ranks(size, body))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_gradient_stays_broken(bad: float) -> None:
    passes = [{"x": torch.tensor([1.0, bad])}, {"x": torch.tensor([1.0, 1.0])}]
    sums = ExactSums(LocalWorld())
    result = summed(sums, {"x": parameter_of(2)}, passes, 2)["x"]
    assert not result.isfinite().any()
    assert math.isnan(sums.reduce().squares or 0.0)


def test_skipped_steps_leave_the_exponents() -> None:
    """Else a few of them would make all later gradients zero."""
    sums = ExactSums(LocalWorld())
    parameters = {"x": parameter_of(1000), "y": parameter_of(2)}
    good = {"x": torch.full((1000,), 2.0**-12), "y": torch.ones(2)}
    bad = {"x": torch.full((1000,), math.nan), "y": torch.ones(2)}
    for gradients in (good, bad, bad, bad, good):
        result = summed(sums, parameters, [gradients], 1)["x"]
    assert torch.equal(result, good["x"])
    assert max(sums.exponents.values()) <= 1


def test_gradients_of_every_form() -> None:
    """Half and double precision, complex, sparse, in another order in memory, and none."""
    given = {
        "double": torch.tensor([1.0, 2.0**-30], dtype=torch.float64),
        "half": torch.tensor([3.0, 0.5], dtype=torch.float16),
        "complex": torch.tensor([1 + 2j, 3 - 1j]),
        "sparse": torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=False),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "transposed": torch.arange(6.0).view(3, 2).T,
    }
    parameters = {
        name: nn.Parameter(torch.zeros_like(each.to_dense())) for name, each in given.items()
    }
    parameters["none"] = parameter_of(2)
    results = summed(ExactSums(LocalWorld()), parameters, [given, given], 2)
    assert results.pop("none") is None
    for name, result in results.items():
        assert result.dtype == given[name].dtype
        assert torch.equal(result, 2 * given[name].to_dense()), name
