"""Buffers: running statistics are averaged over micro-batches; others
have the value of the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hvd_train.network.buffers import StepBuffers
from hvd_train.world.world import World
from tests.support import runs
from tests.support.runs import small_config, trained
from tests.support.worlds import run_ranks

CPU = torch.device("cpu")
assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
INPUTS = [torch.sin(torch.arange(12.0).view(4, 3) * (n + 1)) for n in range(5)]


def take(world: World, held: StepBuffers, model: nn.Module, micros: list[Tensor]) -> None:
    held.begin(len(micros))
    for number, micro in list(enumerate(micros))[world.place.rank :: world.place.size]:
        held.put_back()
        model(micro).square().sum().backward()
        held.end_micro_batch(number)
    total = world.sum(
        torch.cat([torch.tensor([float(held.others_changed)]), *held.changes]), "changes"
    )
    if total[0] > 0:
        held.broadcast_others(world)
    held.finish(total[1:], len(micros))


def test_running_statistics_move_by_the_mean_over_micro_batches() -> None:
    def body(world):
        layer = nn.BatchNorm1d(3, momentum=0.1)
        layer.running_mean.fill_(7.0)
        take(world, StepBuffers(layer, CPU), layer, INPUTS)
        return layer.state_dict()

    mean = torch.stack([micro.mean(0) for micro in INPUTS]).mean(0)
    var = torch.stack([micro.var(0) for micro in INPUTS]).mean(0)
    for state in (state for size in (1, 3) for state in run_ranks(size, body)):
        torch.testing.assert_close(state["running_mean"], 0.9 * 7 + 0.1 * mean)
        torch.testing.assert_close(state["running_var"], 0.9 + 0.1 * var)
        assert state["num_batches_tracked"] == 1


class Noted(nn.Module):
    """Pass the input on, and let a function change the buffer `held` in each pass."""

    def __init__(self, start: Tensor, change: Callable[[Noted, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("held", start.clone())
        self.change = change
        self.before = []

    def forward(self, values: Tensor) -> Tensor:
        self.before.append(self.held.clone())
        self.change(self, values)
        return values * self.weight


def assigns(module: Noted, values: Tensor) -> None:
    module.held = 0.9 * module.held + (values * module.weight).mean(0)


def writes(module: Noted, values: Tensor) -> None:
    module.held += (values.sum() * 100).to(module.held.dtype)


def draws(module: Noted, values: Tensor) -> None:
    generator = torch.Generator()
    generator.set_state(module.held)
    torch.rand(int(values.abs().sum()), generator=generator)
    module.held = generator.get_state()


BUFFERS = {
    "a mean, assigned": (torch.tensor([1.0, -0.0, 1e-40]), assigns),
    "written by way of data": (torch.zeros(2), lambda m, x: m.held.data.add_(x.sum())),
    "changed by another micro-batch alone": (
        torch.zeros(3),
        lambda m, x: torch.equal(x, INPUTS[1]) and m.held.add_(1),
    ),
    "a counter beyond 2^53": (torch.tensor(2**60 + 1), writes),
    "the state of a generator": (torch.Generator().manual_seed(3).get_state(), draws),
    "not a number": (torch.tensor([torch.nan, torch.inf]), writes),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_has_the_value_of_micro_batch_0(name: str) -> None:
    start, change = BUFFERS[name]

    def body(world):
        model = Noted(start, change)
        held = StepBuffers(model, CPU)
        values = []
        for step in range(3):
            begun = model.held.detach().clone()
            take(world, held, model, [micro + step for micro in INPUTS])
            for value in model.before:
                assert_same(value, begun)
            model.before.clear()
            values.append(model.held.detach().clone())
        return values

    alone = Noted(start, change)
    expected = []
    for step in range(3):
        alone(INPUTS[0] + step)
        alone.held = alone.held.detach()
        expected.append(alone.held.clone())
    for size in (1, 2, 3):
        for values in run_ranks(size, body):
            assert_same(values, expected)


def test_an_evaluation_changes_no_buffer() -> None:
    def make(num_classes):
        model = runs.convnet(num_classes)
        model.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        model.register_forward_hook(lambda module, *_: module.passes.add_(1) and None)
        return model

    results = run_ranks(2, lambda world: trained(world, small_config(epochs=1), make))
    assert [weights["passes"] for _, weights in results] == [10, 10]
