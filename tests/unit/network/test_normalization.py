"""Running statistics over the slots of a step; batch norm over ranks is in test_normalization_sync.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hvd_train.network.normalization import RunningStatistics
from hvd_train.world.world import LocalWorld, World
from tests.support.worlds import ThreadWorld, run_ranks

SLOTS = [torch.sin(torch.arange(12.0).view(4, 3) * (n + 1)) for n in range(5)]


def stepped(world: World, model: nn.Module, slots: list[Tensor], *, undo: bool = False) -> None:
    """The forward passes of one step on this rank."""
    statistics = RunningStatistics(model)
    statistics.begin()
    for slot in slots[world.place.rank :: world.place.size]:
        statistics.begin_slot()
        model(slot)
        statistics.end_slot()
    if undo:
        statistics.undo()
        return
    total = world.sum(torch.cat([torch.zeros(0), *statistics.changes]), "changes")
    statistics.finish(total, len(slots))


def started() -> nn.BatchNorm1d:
    """A layer with statistics of its own."""
    layer = nn.BatchNorm1d(3, momentum=0.1)
    layer.running_mean.copy_(torch.tensor([1.0, -2.0, 0.5]))
    layer.running_var.copy_(torch.tensor([0.5, 1.0, 2.0]))
    return layer


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_statistics_move_by_the_mean_over_slots(size: int) -> None:
    """By hand: 0.9 of the old value and 0.1 of the mean of the slots' own, whatever the number of ranks."""

    def body(world: ThreadWorld) -> dict[str, Tensor]:
        layer = started()
        stepped(world, layer, SLOTS)
        return layer.state_dict()

    mean = torch.stack([slot.mean(0) for slot in SLOTS]).mean(0)
    var = torch.stack([slot.var(0) for slot in SLOTS]).mean(0)
    for state in run_ranks(size, body):
        torch.testing.assert_close(state["running_mean"], 0.9 * started().running_mean + 0.1 * mean)
        torch.testing.assert_close(state["running_var"], 0.9 * started().running_var + 0.1 * var)
        assert state["num_batches_tracked"] == 1


def test_one_slot_is_what_torch_does() -> None:
    """With a single slot the layer ends as if nobody had watched it."""
    mine, plain = started(), started()
    stepped(LocalWorld(), mine, SLOTS[:1])
    plain(SLOTS[0])
    torch.testing.assert_close(mine.running_mean, plain.running_mean)
    torch.testing.assert_close(mine.running_var, plain.running_var)


def test_a_frozen_layer_stays_as_it_was_to_the_last_bit() -> None:
    """In evaluation mode nothing changes, whatever the values are."""
    layer = started()
    layer.running_mean.copy_(torch.tensor([1 / 3, 1e-30, 1e30]))
    before = layer.running_mean.clone()
    stepped(LocalWorld(), layer.eval(), SLOTS)
    assert torch.equal(layer.running_mean, before)
    assert layer.num_batches_tracked == 0


def test_a_broken_step_is_undone() -> None:
    """Back to the statistics with which the step began."""
    layer = started()
    stepped(LocalWorld(), layer, SLOTS, undo=True)
    assert torch.equal(layer.running_mean, started().running_mean)
    assert torch.equal(layer.running_var, started().running_var)
    assert layer.num_batches_tracked == 0


def test_a_model_without_such_layers_has_nothing_to_exchange() -> None:
    """No number travels for nothing."""
    stepped(LocalWorld(), nn.Linear(3, 3), SLOTS)
    assert RunningStatistics(nn.Linear(3, 3)).changes == []
