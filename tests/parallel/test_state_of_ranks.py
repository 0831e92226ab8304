"""The state of a training on real ranks: a newcomer takes it in while the others train, and what differs is found."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from hvd_train import Config, handover
from hvd_train.data.batches import MicroBatch
from hvd_train.errors import ReplicasDiffer
from hvd_train.progress.order import Cut
from hvd_train.state import TrainState, confirm_equal
from hvd_train.step import Votes
from hvd_train.transfer import hand_over
from hvd_train.world.world import Reduction, World
from tests.support import runs
from tests.support.batches import batch_of
from tests.support.device import DEVICE, keep_busy
from tests.support.steps import TaskSteps
from tests.support.tasks import meter_of_classes
from tests.support.worlds import own_generator

pytestmark = pytest.mark.parallel


def state_on(world: World) -> TrainState:
    """Return a state with which no step has been taken."""
    model = own_generator(runs.batch_norm(10)).to(DEVICE)
    optimizer = world.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model, Reduction())
    return TrainState(model, optimizer, torch.amp.GradScaler(DEVICE.type, enabled=False), Cut(4, 4))


def take(step: TaskSteps, state: TrainState, *, with_slot: bool) -> None:
    """Take a step in which one rank has all samples; the weights and what follows from them are late on a GPU."""
    inputs = torch.cos(torch.arange(4 * 64.0, device=DEVICE) * (1 + state.progress.step)).view(4, 1, 8, 8)
    micro = MicroBatch(0, inputs, torch.arange(4, device=DEVICE), np.arange(4))
    keep_busy(20)
    result = step.take(state, batch_of(4, 1, *[micro][: int(with_slot)]), Votes(), want_norm=False)
    state.count_step(result.totals, skipped=result.skipped)


def tensors_of(state: TrainState) -> list[Tensor]:
    """Return the weights and what the optimizer has for each."""
    return [*state.model.parameters(), *(one["exp_avg"] for one in state.optimizer.state.values())]


def test_a_newcomer_takes_the_state_in_beside_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is of one moment, however late a GPU is: at the end the newcomer has what it would have trained."""
    monkeypatch.setattr(handover, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(handover, "PART_BYTES", 2000)
    rank, newcomer = world.place.rank, world.place.size - 1
    if newcomer == 0:
        return
    digests = []
    for hands_over in (False, True):
        state = state_on(world)
        step = TaskSteps(Config(), world, state.model, DEVICE, meter_of_classes())
        take(step, state, with_slot=rank == 0)
        if hands_over:
            if rank == newcomer:
                with torch.no_grad():
                    torch._foreach_add_(tensors_of(state), 1.0)
            giving = hand_over(state, world, 0, has_it=rank != newcomer)
            assert giving.is_under_way
            step = TaskSteps(Config(), world, state.model, DEVICE, meter_of_classes(), handover=giving)
        for _ in range(12):
            take(step, state, with_slot=rank == 0)
        assert not hands_over or giving.is_done
        confirm_equal(state, world)
        digests.append(state.digest())
    assert digests[0] == digests[1]


def test_a_snapshot_is_of_one_moment(world: World) -> None:
    """What a commit writes is the state after its step, though the GPU is late then and the next steps come at once."""
    state, rank = state_on(world), world.place.rank
    step = TaskSteps(Config(), world, state.model, DEVICE, meter_of_classes())
    take(step, state, with_slot=rank == 0)
    keep_busy(100)
    snapshot = copy.deepcopy(state.snapshot())  # read at once, as by a commit
    digest = state.digest()
    for _ in range(2):
        take(step, state, with_slot=rank == 0)
    loaded = state_on(world)
    loaded.load(snapshot)
    assert loaded.digest() == digest != state.digest()


def test_one_weight_of_one_rank_that_differs_is_found(world: World) -> None:
    """The digests at the end of a run see the last bit of a weight, though it was changed a moment ago."""
    state = state_on(world)
    confirm_equal(state, world)
    if world.place.rank == world.place.size - 1:
        with torch.no_grad():
            *_, bias = state.model.parameters()
            bias[-1] = torch.nextafter(bias[-1], bias[-1] + 1)
    keep_busy(100)
    if world.place.size > 1:
        with pytest.raises(ReplicasDiffer):
            confirm_equal(state, world)
