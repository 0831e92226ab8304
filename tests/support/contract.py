"""What every World promises: one body of tests, run on the world of one, on threads and on Horovod.

Each test takes `on_ranks`, which runs a function of the world on every rank there is. Tensors are on `device.DEVICE`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train.errors import UsageError
from hvd_train.state import to_host
from hvd_train.world.world import Reduction, World, barrier
from tests.support.device import DEVICE

OnRanks = Callable[[Callable[[World], Any]], Any]
PROMISES = [
    "test_a_sum_adds_what_each_rank_gives",
    "test_sums_for_a_stream_are_what_comes_after_them_on_it",
    "test_sums_may_be_awaited_in_another_order_than_they_were_started",
    "test_a_sum_keeps_type_and_shape_and_goes_on_step_after_step",
    "test_broadcast_gives_every_rank_the_nested_value_of_any_root",
    "test_tensors_of_any_root_fill_those_of_all_ranks",
    "test_tensors_arrive_beside_other_operations",
    "test_gather_gives_all_values_in_the_order_of_ranks",
    "test_values_larger_than_one_operation_carries_arrive_whole",
    "test_gradients_become_the_sum_over_all_ranks_whatever_number_of_passes_each_makes",
    "test_passes_may_change_from_step_to_step",
    "test_a_parameter_without_a_gradient_gets_zeros",
    "test_a_frozen_parameter_stays_without_a_gradient",
    "test_a_wire_of_few_bits_rounds_once_for_each_number_and_addition",
    "test_all_floating_point_types_that_travel_can_be_summed",
    "test_shared_weights_take_the_steps_of_own_ones",
    "test_weights_stay_bit_identical_on_all_ranks",
    "test_the_value_of_the_body_is_the_value_of_run",
    "test_an_error_of_the_body_leaves_run_as_it_is",
    "test_the_facts_of_the_place_fit_together",
    "test_all_ranks_name_the_same_transport",
    "test_a_timeline_that_nobody_asked_for_before_the_ranks_met_changes_nothing",
]
__all__ = [*PROMISES, "PROMISES", "OnRanks"]


# Where gradients are compared they are float64, of magnitudes up to 100, each made by fewer than a hundred additions:
# another order of them, on another processor, changes them by less than 100 * 100 * 2**-53, which is 1.1e-12. A pass
# that is missing or counted twice changes them by far more.
_FEW_ROUNDINGS = 1.1e-12


def test_a_sum_adds_what_each_rank_gives(on_ranks: OnRanks) -> None:
    """A sum is that of the tensors of all ranks, uneven values and all."""

    def body(world: World) -> None:
        rank, size = world.place.rank, world.place.size
        total = world.sum(torch.tensor([rank + 0.5, -2.0 * rank, 1.0], device=DEVICE), "uneven")
        pairs = size * (size - 1) / 2
        assert total.tolist() == [pairs + 0.5 * size, -2 * pairs, size]

    on_ranks(body)


def test_sums_for_a_stream_are_what_comes_after_them_on_it(on_ranks: OnRanks) -> None:
    """What is computed with such a sum, another one included, has all of it in it; here it is read at the end."""

    def body(world: World) -> None:
        rank, size = world.place.rank, world.place.size
        total = torch.full((3,), rank + 0.5, device=DEVICE)
        for _ in range(3):
            total = world.sum_for_stream(total - rank, "one after another") + rank
        assert total.tolist() == [0.5 * size**3 + rank] * 3

    on_ranks(body)


def test_sums_may_be_awaited_in_another_order_than_they_were_started(on_ranks: OnRanks) -> None:
    """Several sums under way at once are told apart by their names."""

    def body(world: World) -> None:
        size = world.place.size
        first = world.start_sum(torch.full((3,), 1.0, device=DEVICE), "first")
        second = world.start_sum(torch.full((2, 2), 10.0, device=DEVICE), "second")
        third = world.start_sum(torch.full((1,), 100.0, device=DEVICE), "third")
        assert third().tolist() == [100.0 * size]
        assert first().tolist() == [1.0 * size] * 3
        assert second().tolist() == [[10.0 * size] * 2] * 2

    on_ranks(body)


def test_a_sum_keeps_type_and_shape_and_goes_on_step_after_step(on_ranks: OnRanks) -> None:
    """The same name serves step after step; float64 sums are exact beyond float32."""

    def body(world: World) -> None:
        for step in range(5):
            given = torch.full((2, 1, 3), 1.0 + 2.0**-40 * step, dtype=torch.float64, device=DEVICE)
            total = world.sum(given.clone(), "again")
            assert total.dtype == torch.float64
            assert torch.equal(total, given * world.place.size)

    on_ranks(body)


def test_broadcast_gives_every_rank_the_nested_value_of_any_root(on_ranks: OnRanks) -> None:
    """Any rank can be the root; the others pass nothing, and tensors arrive bit for bit."""

    def body(world: World) -> None:
        for root in range(world.place.size):
            value = {
                "name": f"of {root}",
                "tensors": [torch.arange(6.0).view(2, 3) + root, torch.tensor(root)],
                "deeper": {"none": None, "pair": (root, 0.1)},
            }
            got = world.broadcast(value if world.place.rank == root else None, root)
            assert got is not None
            assert (got["name"], got["deeper"]) == (value["name"], value["deeper"])
            assert all(torch.equal(a, b) for a, b in zip(got["tensors"], value["tensors"], strict=True))

    on_ranks(body)


def test_tensors_of_any_root_fill_those_of_all_ranks(on_ranks: OnRanks) -> None:
    """Bit for bit and in place, whatever their types, sizes and orders in memory; the bytes are counted."""

    def body(world: World) -> None:
        for root in range(world.place.size):
            tensors = _of_many_kinds(world.place.rank)
            places = [tensor.data_ptr() for tensor in tensors]
            counts = [0]
            world.broadcast_tensors(tensors, root, counts.append)
            for got, want in zip(tensors, _of_many_kinds(root), strict=True):
                assert torch.equal(got, want)
                assert got.stride() == want.stride()
            assert [tensor.data_ptr() for tensor in tensors] == places
            if world.place.size > 1:
                assert sum(counts) == sum(tensor.nbytes for tensor in tensors)

    on_ranks(body)


def test_tensors_arrive_beside_other_operations(on_ranks: OnRanks) -> None:
    """A broadcast that has begun goes on while ranks sum; who asks to keep its tensors takes part without them."""

    def body(world: World) -> None:
        rank, size = world.place.rank, world.place.size
        for turn in range(2):
            root, keeps = turn % size, (turn + 1) % size
            tensors = _of_many_kinds(rank)
            wait = world.start_broadcast(tensors, root, keep=rank == keeps)
            assert world.sum(torch.ones(3, device=DEVICE), "beside").tolist() == [size] * 3
            wait()
            expected = _of_many_kinds(rank if rank == keeps else root)
            assert all(torch.equal(got, want) for got, want in zip(tensors, expected, strict=True))

    on_ranks(body)


def test_gather_gives_all_values_in_the_order_of_ranks(on_ranks: OnRanks) -> None:
    """Every rank gets the values of all, of different length and kind, errors too."""

    def body(world: World) -> None:
        rank, size = world.place.rank, world.place.size
        assert world.gather("x" * (1000 * rank)) == ["x" * (1000 * r) for r in range(size)]
        errors = world.gather(UsageError("last") if rank == size - 1 else None)
        assert errors[:-1] == [None] * (size - 1)
        assert (type(errors[-1]), errors[-1].args) == (UsageError, ("last",))
        barrier(world)

    on_ranks(body)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="values travel through the memory of the host, as on CPUs")
def test_values_larger_than_one_operation_carries_arrive_whole(on_ranks: OnRanks) -> None:
    """They travel in pieces: of values of different length, too, nothing is left out or mixed up."""

    def body(world: World) -> None:
        rank, size = world.place.rank, world.place.size
        million = list(range(2_000_000))
        assert world.broadcast(million if rank == size - 1 else None, size - 1) == million
        assert world.gather(million[rank : rank * 1_500_000]) == [million[r : r * 1_500_000] for r in range(size)]

    on_ranks(body)


def test_gradients_become_the_sum_over_all_ranks_whatever_number_of_passes_each_makes(on_ranks: OnRanks) -> None:
    """Ranks with 3, 1 and no backward passes all end with the gradient of the whole batch."""

    def body(world: World) -> None:
        model, optimizer = _model(world)
        for turn in range(3):
            passes = [[3, 1, 2], [1, 3, 0], [0, 2, 1]][turn][: world.place.size]
            world.expect_passes(optimizer, passes[world.place.rank])
            model.zero_grad(set_to_none=True)
            for number in range(passes[world.place.rank]):
                _loss(model, world.place.rank, number).backward()
            with world.reduced(optimizer):
                expected = _gradients([(rank, n) for rank, count in enumerate(passes) for n in range(count)])
                for got, want in zip(_grads(model), expected, strict=True):
                    torch.testing.assert_close(got, want, rtol=0, atol=_FEW_ROUNDINGS)
                optimizer.step()

    on_ranks(body)


def test_passes_may_change_from_step_to_step(on_ranks: OnRanks) -> None:
    """A step with fewer or more passes than the one before reduces nothing too early and nothing twice."""

    def body(world: World) -> None:
        model, optimizer = _model(world)
        for passes in (1, 4, 2, 2, 1):
            world.expect_passes(optimizer, passes)
            model.zero_grad(set_to_none=True)
            for number in range(passes):
                _loss(model, world.place.rank, number).backward()
            with world.reduced(optimizer):
                expected = _gradients([(rank, n) for rank in range(world.place.size) for n in range(passes)])
                for got, want in zip(_grads(model), expected, strict=True):
                    torch.testing.assert_close(got, want, rtol=0, atol=_FEW_ROUNDINGS)
                optimizer.step()

    on_ranks(body)


def test_a_parameter_without_a_gradient_gets_zeros(on_ranks: OnRanks) -> None:
    """A part of the model that no rank has used counts as zero, so that weight decay acts on it everywhere."""

    def body(world: World) -> None:
        model, optimizer = _model(world)
        world.expect_passes(optimizer, 1)
        model.zero_grad(set_to_none=True)
        model[0](torch.ones(1, 4, dtype=torch.float64, device=DEVICE)).sum().backward()
        with world.reduced(optimizer):
            assert model[2].weight.grad.tolist() == [[0.0] * 3] * 2
            assert model[0].bias.grad.tolist() == [float(world.place.size)] * 3

    on_ranks(body)


def test_a_frozen_parameter_stays_without_a_gradient(on_ranks: OnRanks) -> None:
    """What is not trained does not travel and is not touched."""

    def body(world: World) -> None:
        model = _weights()
        model[0].weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = world.wrap(torch.optim.SGD(trained, lr=0.1, weight_decay=0.1), model, Reduction())
        world.expect_passes(optimizer, 1)
        model.zero_grad(set_to_none=True)
        _loss(model, world.place.rank, 0).backward()
        with world.reduced(optimizer):
            optimizer.step()
        assert model[0].weight.grad is None
        assert torch.equal(model[0].weight, _weights()[0].weight)
        assert not torch.equal(model[2].weight, _weights()[2].weight)

    on_ranks(body)


def test_a_wire_of_few_bits_rounds_once_for_each_number_and_addition(on_ranks: OnRanks) -> None:
    """Gradients stay fp32 tensors; they are the sum of those of all ranks, as far as the wire's format can tell."""

    def body(world: World) -> None:
        size = world.place.size
        of_ranks = [_gradients([(rank, 0), (rank, 1)], torch.float32) for rank in range(size)]
        for wire, predivide in itertools.product((torch.float16, torch.bfloat16), (1.0, 3.0)):
            model = _weights(torch.float32)
            reduction = Reduction(wire=wire, predivide=predivide)
            optimizer = world.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, reduction)
            world.expect_passes(optimizer, 2)
            model.zero_grad(set_to_none=True)
            for number in range(2):
                _loss(model, world.place.rank, number).backward()
            with world.reduced(optimizer):
                for got, *parts in zip(_grads(model), *of_ranks, strict=True):
                    assert got.dtype == torch.float32
                    # Before a sum and after it each number is multiplied, on a GPU in fp16 by a factor that is rounded.
                    assert _within_roundings(got, parts, wire, size if predivide == 1 else size + 3)

    on_ranks(body)


def test_all_floating_point_types_that_travel_can_be_summed(on_ranks: OnRanks) -> None:
    """What `can_sum` says is so: numbers from far outside of fp16's range have their sum, and NaN stays NaN."""

    def body(world: World) -> None:
        size = world.place.size
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            assert world.can_sum(dtype)
            numbers = torch.tensor([1.5, -0.25, float("nan")], dtype=dtype, device=DEVICE)
            if dtype != torch.float16:
                numbers = torch.cat([numbers, torch.tensor([2.0**100, 2.0**-120], dtype=dtype, device=DEVICE)])
            # A whole number of each, which 8 bits can hold.
            assert torch.equal(world.sum(numbers.clone(), f"of {dtype}").nan_to_num(7), (numbers * size).nan_to_num(7))

    on_ranks(body)


def test_shared_weights_take_the_steps_of_own_ones(on_ranks: OnRanks) -> None:
    """Where a host keeps one copy of the weights, uneven passes, frozen parameters and clipped steps give the same."""

    def body(world: World) -> None:
        results = []
        for shared in (False, True):
            model = _weights().float()
            optimizer = world.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model, Reduction())
            if shared:
                world.share_weights(optimizer, small=True)
            for step in range(6):
                model[0].weight.requires_grad_(step not in (2, 3))
                if step in (2, 4):
                    world.regroup(optimizer)
                passes = (world.place.rank + step) % 3
                world.expect_passes(optimizer, passes)
                model.zero_grad(set_to_none=True)
                count = world.sum_with_gradients(optimizer, torch.ones(1, device=DEVICE))
                for number in range(passes):
                    inputs = torch.arange(4.0, device=DEVICE) * (1 + number) + world.place.rank
                    model(inputs.view(1, 4)).square().sum().backward()
                with world.reduced(optimizer) as gradient:
                    numbers, norm = gradient.read(count())
                    assert numbers == [world.place.size]
                    assert math.isfinite(norm)
                    gradient.take_step(0.5 if step == 5 else None)
            results.append(to_host([*model.state_dict().values(), optimizer.state_dict()["state"][2]["exp_avg_sq"]]))
        for own, of_host in zip(*results, strict=True):
            # Another order of additions: a few roundings of numbers below 2^12, and of weights far smaller.
            torch.testing.assert_close(own, of_host, rtol=2**-20, atol=2**-24)
        for other in world.gather(results[1]):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[1], other, strict=True))

    on_ranks(body)


def test_weights_stay_bit_identical_on_all_ranks(on_ranks: OnRanks) -> None:
    """After steps with momentum, weight decay and uneven passes the weights of all ranks are the same bits."""

    def body(world: World) -> None:
        model, optimizer = _model(world, momentum=0.9, weight_decay=0.01)
        for step in range(6):
            passes = (world.place.rank + step) % 3
            world.expect_passes(optimizer, passes)
            model.zero_grad(set_to_none=True)
            for number in range(passes):
                _loss(model, world.place.rank, number + step).backward()
            with world.reduced(optimizer):
                optimizer.step()
        states = world.gather(to_host([model.state_dict(), list(optimizer.state_dict()["state"].values())]))
        first = states[0]
        for other in states[1:]:
            assert all(torch.equal(first[0][name], other[0][name]) for name in first[0])
            for mine, theirs in zip(first[1], other[1], strict=True):
                assert torch.equal(mine["momentum_buffer"], theirs["momentum_buffer"])

    on_ranks(body)


def test_the_value_of_the_body_is_the_value_of_run(on_ranks: OnRanks) -> None:
    """`run` gives what the body gives."""
    on_ranks(lambda world: _equal(world.run(lambda: ("value", world.place.rank)), ("value", world.place.rank)))


def test_an_error_of_the_body_leaves_run_as_it_is(on_ranks: OnRanks) -> None:
    """An error of the user's code is not dressed up as a lost rank."""

    def body(world: World) -> None:
        def fail() -> None:
            raise KeyError("user")

        try:
            world.run(fail)
        except KeyError as error:
            assert error.args == ("user",)
        else:
            raise AssertionError("the error is lost")

    on_ranks(body)


def test_the_facts_of_the_place_fit_together(on_ranks: OnRanks) -> None:
    """Ranks are 0..size-1, each once, and no rank is beyond the size of its host."""

    def body(world: World) -> None:
        places = world.gather(world.place)
        assert [place.rank for place in places] == list(range(world.place.size))
        assert all(place.size == len(places) and 0 <= place.local_rank < place.local_size for place in places)

    on_ranks(body)


def test_all_ranks_name_the_same_transport(on_ranks: OnRanks) -> None:
    """All ranks say that sums travel by the same library."""

    def body(world: World) -> None:
        (transport,) = set(world.gather(world.transport(DEVICE)))
        by_nccl = ("NCCL, with Gloo", "NCCL, with MPI")
        assert transport in ("none", *(by_nccl if DEVICE.type == "cuda" else ("Gloo", "MPI", "threads")))

    on_ranks(body)


def _equal(got: object, want: object) -> None:
    assert got == want


def _of_many_kinds(seed: int) -> list[Tensor]:
    """Tensors that share pieces and one that is split, with no element like that of another seed."""
    numbers = torch.arange(2 * 3 * 4 * 5, device=DEVICE).view(2, 3, 4, 5) * 5 + seed
    kinds = [
        numbers.float().to(memory_format=torch.channels_last),
        numbers.double().transpose(0, 1),
        numbers.bfloat16(),
    ]
    kinds += [
        torch.tensor(seed + 0.5, device=DEVICE),
        torch.empty(0, 3, device=DEVICE),
        torch.tensor([seed % 2 == 0], device=DEVICE),
        torch.zeros((), dtype=torch.int64, device=DEVICE),
    ]
    large = torch.arange(3_000_001, dtype=torch.int32, device=DEVICE) + seed
    kinds += [large, torch.nn.Parameter(numbers[0].half())]
    return kinds


def _weights(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(DEVICE, dtype)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel(), dtype=dtype, device=DEVICE).view(parameter.shape)
            parameter.copy_(torch.sin(values * 1.7 + number))
    return model


def _within_roundings(got: Tensor, parts: list[Tensor], wire: torch.dtype, roundings: int) -> bool:
    """Return whether `got` is the sum of `parts` but for so many roundings to `wire` on the way of each number.

    Each is wrong by the unit roundoff of what it rounds, which is no more than all magnitudes together, or by half of
    the smallest number. float32, in which each rank has computed its own part, may be wrong by some roundings as well.
    """
    unit, smallest = torch.finfo(wire).eps / 2, torch.finfo(wire).tiny * torch.finfo(wire).eps
    exact = torch.stack(parts).double()
    growth = (1 + unit) ** roundings - 1 + 2.0**-20
    bound = growth * exact.abs().sum(0) + roundings * smallest
    return bool(((got.double() - exact.sum(0)).abs() <= bound).all())


def _model(world: World, **settings: float) -> tuple[nn.Sequential, Optimizer]:
    model = _weights()
    # A learning rate of zero unless asked for: the gradient expected is then that of the first weights.
    rate = 0.1 if settings else 0.0
    return model, world.wrap(torch.optim.SGD(model.parameters(), lr=rate, **settings), model, Reduction())


def _loss(model: nn.Module, rank: int, number: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    inputs = torch.cos(torch.arange(8, dtype=dtype, device=DEVICE).view(2, 4) * (rank + 1) + number)
    loss: Tensor = model(inputs).square().sum()
    return loss


def _gradients(passes: list[tuple[int, int]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    model = _weights(dtype)
    for rank, number in passes:
        _loss(model, rank, number).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def _grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_timeline_that_nobody_asked_for_before_the_ranks_met_changes_nothing(on_ranks: OnRanks) -> None:
    """It may begin and end, twice as well, around sums that stay what they are; no file appears."""

    def body(world: World) -> None:
        path = Path(f"timeline-{world.place.rank}.json")
        for turn in (path, path, None, None):
            world.timeline(turn)
            assert world.sum(torch.ones(2, device=DEVICE), "beside a timeline").tolist() == [world.place.size] * 2
        assert not path.exists()

    on_ranks(body)
