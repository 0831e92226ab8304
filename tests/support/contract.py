"""The promises of every World: tests on the world of one, on threads and on
Horovod (fixture `on_ranks`).
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from hvd_train.errors import RankLost, UsageError
from hvd_train.world.world import World

Model = TypeVar("Model", bound=nn.Module)
OnRanks = Callable[[Callable[[World], Any]], Any]


def on_every_rank(body: Callable[[World], None]) -> Callable[[OnRanks], None]:
    """Return a test that runs `body` on every rank."""

    def test(on_ranks: OnRanks) -> None:
        on_ranks(body)

    test.__name__ = body.__name__
    test.__doc__ = body.__doc__
    return test


# Compared gradients are float64 of up to 100, each a sum of fewer than 100 numbers. Another order
# of additions changes them by less than 100 * 100 * 2**-53; a missing or repeated pass changes them
# by far more.
_FEW_ROUNDINGS = 1.1e-12


@on_every_rank
def test_a_sum_adds_what_each_rank_gives(world: World) -> None:
    """It keeps type and shape; one name may be summed repeatedly."""
    rank = world.place.rank
    size = world.place.size
    pairs = size * (size - 1) / 2
    for kind, last in ((torch.float32, 1.0), (torch.float64, 1.0), (torch.float64, 1 + 2.0**-40)):
        given = torch.tensor([[rank + 0.5], [-2.0 * rank], [last]], dtype=kind)
        total = world.sum(given, f"{kind}")
        assert total.dtype == kind
        assert total.tolist() == [[pairs + 0.5 * size], [-2 * pairs], [size * last]]


@on_every_rank
def test_facts_in_which_ranks_differ_are_refused_on_all(world: World) -> None:
    world.compare({"the data set": "12 images"})
    with (
        pytest.raises(UsageError, match="differ in the data set")
        if world.place.size > 1
        else nullcontext()
    ):
        world.compare({"the data set": f"{world.place.rank} images"})


@on_every_rank
def test_broadcast_gives_every_rank_the_nested_value_of_any_root(world: World) -> None:
    for root in range(world.place.size):
        value = {
            "name": f"of {root}",
            "tensors": [torch.arange(6.0).view(2, 3) + root, torch.tensor(root)],
            "deeper": {"none": None, "pair": (root, 0.1)},
        }
        got = world.broadcast(value if world.place.rank == root else None, root)
        assert (got["name"], got["deeper"]) == (value["name"], value["deeper"])
        assert all(torch.equal(a, b) for a, b in zip(got["tensors"], value["tensors"], strict=True))


@on_every_rank
def test_tensors_of_any_root_are_copied_to_all_ranks(world: World) -> None:
    """Tensors of any type, size and memory format arrive in place and bit for bit."""
    for root in range(world.place.size):
        tensors = _of_many_kinds(world.place.rank)
        places = [tensor.data_ptr() for tensor in tensors]
        world.broadcast_tensors(tensors, root)
        for got, want in zip(tensors, _of_many_kinds(root), strict=True):
            assert torch.equal(got, want)
            assert got.stride() == want.stride()
        assert [tensor.data_ptr() for tensor in tensors] == places


@on_every_rank
def test_gather_gives_all_values_in_the_order_of_ranks(world: World) -> None:
    rank = world.place.rank
    size = world.place.size
    assert world.gather("x" * (1000 * rank)) == ["x" * (1000 * r) for r in range(size)]
    errors = world.gather(UsageError("last") if rank == size - 1 else None)
    assert errors[:-1] == [None] * (size - 1)
    assert (type(errors[-1]), errors[-1].args) == (UsageError, ("last",))


@on_every_rank
def test_gradients_become_the_sum_over_all_ranks_and_passes(world: World) -> None:
    """Ranks may take different numbers of passes."""
    model = _model(world)
    for of_ranks in ([3, 1, 2], [1, 3, 0], [0, 2, 1], [4, 2, 1], [2, 1, 4]):
        passes = of_ranks[: world.place.size]
        _backward(world, model, range(passes[world.place.rank]))
        world.reduce()
        _assert_gradients(
            model, [(rank, n) for rank, count in enumerate(passes) for n in range(count)]
        )


@on_every_rank
def test_an_update_begins_without_other_ranks(world: World) -> None:
    """So ranks that begin to train different parameters can still say so."""
    model = _model(world)
    _backward(world, model)
    world.reduce()
    parameters = [*model.parameters()]
    world.begin_update(parameters if world.place.rank == 0 else parameters[:1], 1)
    assert world.gather(world.place.rank) == [*range(world.place.size)]


@on_every_rank
def test_numbers_that_travel_with_gradients_are_summed_as_they_are(world: World) -> None:
    """Losses and votes are exact."""
    model = _model(world)
    model.zero_grad(set_to_none=True)
    world.begin_update([*model.parameters()], 1)
    numbers = torch.tensor([1.0, world.place.rank + 0.25], dtype=torch.float64)
    wait = world.start_sum(numbers, "step")
    _loss(model, world.place.rank, 0).backward()
    world.reduce()
    ranks = range(world.place.size)
    assert wait().tolist() == [len(ranks), sum(rank + 0.25 for rank in ranks)]
    _assert_gradients(model, [(rank, 0) for rank in ranks])


@on_every_rank
def test_a_parameter_has_a_gradient_if_it_has_one_on_any_rank(world: World) -> None:
    """Without one it has none on all ranks, so no weight decay acts on it.

    Each update may train other parameters.
    """
    model = _weights()
    is_last = world.place.rank == world.place.size - 1
    everywhere = [float(world.place.size)] * 3
    world.wrap(model)

    def biases(*trained: str, uses_last: bool) -> list[Tensor | None]:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
            parameter.grad = None
        world.begin_update(
            [parameter for parameter in model.parameters() if parameter.requires_grad], 1
        )
        hidden = model[0](torch.ones(1, 4, dtype=torch.float64)).sum()
        (hidden + model[2].bias.sum() if uses_last else hidden).backward()
        world.reduce()
        return [model[0].bias.grad, model[2].bias.grad]

    for uses_last in (False, True, is_last, True, False, is_last):
        users = sum(world.gather(uses_last))
        first, last = biases("0.bias", "2.bias", uses_last=uses_last)
        assert first.tolist() == everywhere
        assert (None if last is None else last.tolist()) == ([float(users)] * 2 if users else None)
    for trained in (("0.weight", "0.bias"), ("0.bias",), ("0.bias", "0.weight", "2.bias")):
        first, last = biases(*trained, uses_last="2.bias" in trained)
        assert first.tolist() == everywhere
        assert (last is not None, model[0].weight.grad is not None) == (
            "2.bias" in trained,
            "0.weight" in trained,
        )


@on_every_rank
def test_sparse_and_complex_gradients_are_summed_as_on_one_rank(world: World) -> None:
    """Also if a rank has none."""
    rank = world.place.rank
    size = world.place.size
    table = nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
    model = _determined(
        nn.ModuleDict({"table": table, "line": nn.Linear(2, 1, dtype=torch.complex128)})
    )
    world.wrap(model)

    def backward(model: nn.ModuleDict, rank: int, number: int) -> None:
        rows = model["table"](torch.tensor([rank, rank, number + 3]))
        model["line"](rows.to(torch.complex128) * (1 + 2j)).abs().sum().backward()

    for passes in ([1, 2, 0], [2, 1, 1], [2, 1, 1], [2, 0, 1]):
        alone = copy.deepcopy(model)
        for one in (model, alone):
            one.zero_grad(set_to_none=True)
        world.begin_update([*model.parameters()], passes[rank])
        for number in range(passes[rank]):
            backward(model, rank, number)
            world.end_pass()
        world.reduce()
        assert table.weight.grad.is_sparse
        for other in range(size):
            for number in range(passes[other]):
                backward(alone, other, number)
        for summed, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                summed.grad.to_dense(), expected.grad.to_dense(), rtol=0, atol=_FEW_ROUNDINGS
            )


@on_every_rank
def test_a_wire_of_half_precision_keeps_its_digits(world: World) -> None:
    """Gradients stay fp32 tensors and agree with the exact sum to the precision of fp16 or bf16."""
    for compression, unit in (("fp16", 2.0**-10), ("bf16", 2.0**-7)):
        model = _model(world, compression)
        _backward(world, model)
        world.reduce()
        expected = _gradients([(rank, 0) for rank in range(world.place.size)], torch.float32)
        for parameter, want in zip(model.parameters(), expected, strict=True):
            assert parameter.grad.dtype == torch.float32
            # half a unit in the last place of each addend and of each addition, at the largest
            # magnitude
            bound = unit * world.place.size * float(want.abs().max().clamp(min=1.0))
            assert float((parameter.grad - want).abs().max()) <= bound


@on_every_rank
def test_ranks_of_a_fixed_world_meet_once(world: World) -> None:
    """A signal to end stops all of them."""
    calls = []
    world.meet(lambda: calls.append("sync"))
    with pytest.raises(RankLost, match="gone"):
        world.meet(lambda: calls.append("sync"), RankLost("gone"))
    assert calls == ["sync"]
    assert (world.requested(), world.requested(got_signal=True)) == ("train", "stop")


def _of_many_kinds(seed: int) -> list[Tensor]:
    """Return small tensors and one that is split; each element differs from
    the elements of other seeds.
    """
    numbers = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5) * 5 + seed
    return [
        numbers.float().to(memory_format=torch.channels_last),
        numbers.double().transpose(0, 1),
        numbers.bfloat16(),
        torch.tensor(seed + 0.5),
        torch.empty(0, 3),
        torch.tensor([seed % 2 == 0]),
        torch.zeros((), dtype=torch.int64),
        torch.arange(3_000_001, dtype=torch.int32) + seed,
        torch.nn.Parameter(numbers[0].half()),
    ]


def _weights(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return _determined(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype))


def _determined(model: Model) -> Model:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
            parameter.copy_(torch.sin(values * 1.7 + number))
    return model


def _model(world: World, compression: str = "none") -> nn.Sequential:
    model = _weights(torch.float64 if compression == "none" else torch.float32)
    world.wrap(model, compression)
    return model


def _loss(model: nn.Module, rank: int, number: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    inputs = torch.cos(torch.arange(8, dtype=dtype).view(2, 4) * (rank + 1) + number)
    return model(inputs).square().sum()


def _backward(world: World, model: nn.Module, passes: range = range(1)) -> None:
    model.zero_grad(set_to_none=True)
    world.begin_update([*model.parameters()], len(passes))
    for number in passes:
        _loss(model, world.place.rank, number).backward()
        if number != passes[-1]:
            world.end_pass()


def _gradients(passes: list[tuple[int, int]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    model = _weights(dtype)
    for rank, number in passes:
        _loss(model, rank, number).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def _assert_gradients(model: nn.Module, passes: list[tuple[int, int]]) -> None:
    """Assert that the gradients are the sum over these (rank, pass)."""
    if not passes:
        assert all(parameter.grad is None for parameter in model.parameters())
        return
    for parameter, want in zip(model.parameters(), _gradients(passes), strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=0, atol=_FEW_ROUNDINGS)
