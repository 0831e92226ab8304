"""The sums and steps in C: the numbers of torch, to the bit, and a norm that is exact enough for any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_train.world import step_in_c
from hvd_train.world.step_in_c import MOMENTUM, Parts, Rounding, rounding_of

pytestmark = pytest.mark.numeric

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 1e-4},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "all": {"momentum": 0.7, "nesterov": True, "weight_decay": 0.03},
    "one by one": {"momentum": 0.9, "weight_decay": 0.03, "foreach": False, "fused": False},
}
SIZES = (1, 5, 8, 17, 511, 512, 513, 5000)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """As a rank has where there are as many ranks as cores."""


def build_of(**settings: Any) -> Callable[[Any], Optimizer]:
    """Return what makes an optimizer of torch's, fused unless the settings say something else."""
    return lambda groups: torch.optim.SGD(groups, **{"lr": 0.05, "fused": True, **settings})


def weights_of(size: int) -> Tensor:
    """Return some weights."""
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def test_it_was_compiled() -> None:
    """Else ranks would share weights by torch's operators, and nobody would notice."""
    assert step_in_c.is_available()


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_torch(kind: str, factor: float | None) -> None:
    """Weights and momenta are the same to the bit after several steps, whatever is left beside whole vectors."""
    build = build_of(**KINDS[kind])
    for size in SIZES:
        weights = [weights_of(size), weights_of(size)]
        optimizer = build([weights[0]])
        momenta = [torch.zeros(size), torch.zeros(size)]
        has_momenta = "momentum" in KINDS[kind]
        if has_momenta:
            optimizer.state[weights[0]][MOMENTUM] = momenta[0]
        rounding = rounding_of(optimizer, build)
        assert rounding is not None
        parts = Parts([(begin, end, 0, form) for begin, end, form in rounding.parts(0, size, size)])
        for step in range(1, 4):
            gradient = weights_of(size + step)[:size]
            weights[0].grad = gradient if factor is None else gradient * factor
            optimizer.step()
            rows = weights[1], momenta[1] if has_momenta else None, gradient, torch.empty(2 * size)
            parts.descend(np.zeros(1, np.int64), step << 32, (0, False), optimizer.param_groups, factor, rows)
        assert torch.equal(*weights), size
        assert torch.equal(*momenta), size


def test_rates_are_those_of_now() -> None:
    """The schedule changes the learning rate of each group from step to step."""
    weights, groups = torch.ones(4), [{**group, "momentum": 0, "nesterov": False} for group in ({"lr": 0.5}, {"lr": 1})]
    parts = Parts([(0, 2, 0, 0), (2, 4, 1, 0)])
    for group in groups:
        group["weight_decay"] = 0
    for lr in (0.5, 0.25):
        groups[0]["lr"] = lr
        rows = weights, None, torch.ones(4), torch.empty(8)
        parts.descend(np.zeros(1, np.int64), 1 << 32, (0, False), groups, None, rows)
    assert weights.tolist() == [0.25, 0.25, -1, -1]


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other optimizers, a maximum, more than one thread, and machines without the part in C."""
    weights = torch.ones(3)
    assert rounding_of(torch.optim.Adam([weights]), torch.optim.Adam) is None
    assert rounding_of(build_of(maximize=True)([weights]), build_of(maximize=True)) is None
    usual = build_of(momentum=0.9)
    optimizer = usual([weights])
    assert rounding_of(optimizer, usual) is not None
    torch.set_num_threads(2)
    assert rounding_of(optimizer, usual) is None
    torch.set_num_threads(1)
    monkeypatch.setattr(step_in_c, "_library", lambda: None)
    assert rounding_of(optimizer, usual) is None


def test_another_rounding_is_noticed() -> None:
    """An optimizer that rounds as no form does is not taken for one that does."""

    class Other(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                for weight in group["params"]:
                    weight[-1] = torch.nextafter(weight[-1], torch.tensor(9.0))

    assert rounding_of(Other([torch.ones(3)], lr=0.1), Other) is None


def test_a_part_is_cut_where_the_rest_of_its_parameter_begins() -> None:
    """Wherever the shard itself is cut, a number is rounded as in the whole parameter."""
    rounding = Rounding(8, 1, 2)
    assert rounding.parts(0, 21, 21) == [(0, 16, 1), (16, 21, 2)]
    assert rounding.parts(3, 12, 21) == [(3, 12, 1)]
    assert rounding.parts(18, 21, 21) == [(18, 21, 2)]
    assert rounding.parts(0, 16, 16) == [(0, 16, 1)]
    assert rounding.parts(0, 5, 5) == [(0, 5, 2)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_added_in_the_order_of_ranks(ranks: int) -> None:
    """Whoever sums, and wherever the sums go; what lies beside the parts stays."""
    for rank in range(ranks):
        rows = [weights_of(1000 + number)[:1000] for number in range(ranks)]
        own, place = rows[rank][3:990].clone(), 1 if rank == 0 else 0
        expected = rows[0] + rows[1]
        for row in rows[2:]:
            expected += row
        beside = torch.cat([rows[place][:3], rows[place][990:]])
        rows[rank] = torch.full((1000,), 7.0)
        norm = Parts([(3, 500, 0, 0), (500, 990, 0, 0)]).sum([own[:497], own[497:]], rows, rank, place)
        assert torch.equal(rows[place][3:990], expected[3:990])
        assert torch.equal(torch.cat([rows[place][:3], rows[place][990:]]), beside)
        assert norm == pytest.approx(float(torch.linalg.vector_norm(expected[3:990].double())), rel=1e-12)


def test_the_norm_of_many_numbers() -> None:
    """Squares are added in float64: of 20 million of the same size none is lost."""
    size = 20_000_000
    rows = [torch.full((size,), 0.25), torch.full((size,), 0.5)]
    norm = Parts([(0, size, 0, 0)]).sum([rows[0].clone()], rows, 0, 1)
    assert norm == pytest.approx(0.75 * size**0.5, rel=1e-12)
