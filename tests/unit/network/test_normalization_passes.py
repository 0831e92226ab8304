"""What layers of batch norm sum over ranks in a pass, and how ranks that have no slot left take part in it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hvd_train.network.normalization import (
    SumOverRanks,
    SumsInPasses,
    SyncBatchNorm,
    is_synchronised,
    sums_in_passes,
    synchronised,
)
from hvd_train.world.world import LocalWorld, Place

CPU = torch.device("cpu")


class Noting(LocalWorld):
    """One rank of several: notes what it gives to each sum; the others have so much `more` to come at the end."""

    def __init__(self, size: int = 1, more: int = 0) -> None:
        self.place = Place(0, size)
        self.more = more
        self.given: list[tuple[str, list[float]]] = []

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """Note the sum, and add what the others give."""
        self.given.append((name, tensor.tolist()))
        total = 2 * tensor
        if self.more:
            self.more -= 1
            total[-1] += 1
        return total


def test_each_sum_of_a_layer_has_a_name_of_its_own() -> None:
    """Ranks find each other's tensors by it; a copy of a layer sums with the same ranks."""
    world = Noting()
    add = SumOverRanks(world, "batch_norm.body.1")
    assert copy.deepcopy(add) is add
    assert add(torch.tensor([1.0, 3.0]), "forward").tolist() == [2.0, 6.0]
    add(torch.tensor([5.0]), "backward")
    assert world.given == [
        ("batch_norm.body.1.forward", [1.0, 3.0]),
        ("batch_norm.body.1.backward", [5.0]),
    ]


def test_where_a_rank_lacks_a_slot_all_sums_look_alike() -> None:
    """One name and one length, so that it can take part in whichever comes next; a 1 at the end says that more come."""
    world = Noting()
    first, second = SumOverRanks(world, "first"), SumOverRanks(world, "second")
    first.padded = second.padded = 4
    assert first(torch.tensor([1.0, 3.0]), "forward").tolist() == [2.0, 6.0]
    assert second(torch.tensor([5.0, 6.0, 7.0]), "backward").tolist() == [10.0, 12.0, 14.0]
    assert world.given == [("batch_norm", [1.0, 3.0, 0.0, 1.0]), ("batch_norm", [5.0, 6.0, 7.0, 1.0])]


def passes(world: Noting, layers: int = 2) -> tuple[SumsInPasses, list[SumOverRanks]]:
    """The sums of so many layers, the longest of which has 3 numbers."""
    sums = [SumOverRanks(world, f"layer {number}") for number in range(layers)]
    return SumsInPasses(sums, 3, world, CPU), sums


def test_a_rank_with_a_slot_tells_those_that_lack_one_when_it_is_done() -> None:
    """From its last slot on its sums are padded, and with zeros alone it says that it was all."""
    world = Noting(size=3)
    in_passes, sums = passes(world)
    in_passes.begin_step(2, 5)
    assert [each.padded for each in sums] == [None, None]
    in_passes.begin_last_slot()
    assert [each.padded for each in sums] == [4, 4]
    in_passes.end_step()
    assert [each.padded for each in sums] == [None, None]
    assert world.given == [("batch_norm", [0.0] * 4)]


def test_a_rank_that_lacks_a_slot_goes_on_until_the_others_are_done() -> None:
    """It gives zeros to whatever they sum; in its own last slot, a pass before, nobody lacks one yet."""
    world = Noting(size=3, more=2)
    in_passes, sums = passes(world)
    in_passes.begin_step(1, 5)
    in_passes.begin_last_slot()
    assert [each.padded for each in sums] == [None, None]
    assert world.given == []
    with torch.device("meta"):  # the default, which is not where the model is
        in_passes.end_step()
    assert world.given == [("batch_norm", [0.0] * 4)] * 3


@pytest.mark.parametrize(("layers", "num_mine", "num_slots"), [(2, 2, 6), (2, 1, 3), (0, 2, 5), (0, 1, 5)])
def test_where_no_rank_lacks_a_slot_or_nothing_is_summed_nothing_is_said(
    layers: int, num_mine: int, num_slots: int
) -> None:
    """A model without such layers, and a step whose slots come out even, cost no sum."""
    world = Noting(size=3)
    in_passes, sums = passes(world, layers)
    in_passes.begin_step(num_mine, num_slots)
    in_passes.begin_last_slot()
    in_passes.end_step()
    assert [each.padded for each in sums] == [None] * layers
    assert world.given == []


def test_a_step_begins_as_if_none_had_been_broken_before() -> None:
    """A fault may end a step between a last slot and its end."""
    in_passes, sums = passes(Noting(size=3))
    in_passes.begin_step(2, 5)
    in_passes.begin_last_slot()
    in_passes.begin_step(2, 6)
    assert [each.padded for each in sums] == [None, None]
    in_passes.end_step()


def test_the_length_of_all_sums_is_that_of_the_largest_layer() -> None:
    """For each feature a sum and one of squares, then the number of samples and the word that more come."""
    world = Noting(size=2)
    model = synchronised(nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(5), nn.BatchNorm2d(3)), world)
    in_passes = sums_in_passes(model, world, CPU)
    in_passes.begin_step(0, 1)
    in_passes.end_step()
    assert world.given == [("batch_norm", [0.0] * (2 * 5 + 1 + 1))]
    plain = sums_in_passes(nn.Linear(2, 2), world, CPU)
    plain.begin_step(0, 1)
    plain.end_step()
    assert len(world.given) == 1


def test_layers_are_replaced_where_they_stand() -> None:
    """At any depth, by layers with the same tensors and in the same mode; everything else is left as it was."""
    world = Noting()
    plain = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3).eval()), nn.BatchNorm1d(3))
    before = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    linear = plain[0][0]
    assert not is_synchronised(plain)
    model = synchronised(plain, world)
    assert model is plain
    assert is_synchronised(model)
    assert model[0][0] is linear
    assert [type(layer) for layer in (model[0][1], model[1])] == [SyncBatchNorm] * 2
    assert [layer.training for layer in (model[0][1], model[1])] == [False, True]
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(after) == list(before)
    assert all(after[name] is tensor for name, tensor in before.items())
    model[0][1].train()
    model(torch.ones(4, 2)).sum().backward()
    names = [name for name, _ in world.given]
    layers = ("batch_norm.0.1", "batch_norm.1")
    assert names == [*(f"{layer}.forward" for layer in layers), *(f"{layer}.backward" for layer in layers[::-1])]


def test_a_model_that_is_one_layer_is_replaced_itself() -> None:
    """There is nothing that it could stand in."""
    plain = nn.BatchNorm1d(3)
    model = synchronised(plain, LocalWorld())
    assert isinstance(model, SyncBatchNorm)
    assert model.weight is plain.weight
