"""The same training on all ranks of the launcher and on one rank alone."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hvd_train import Config
from hvd_train.progress.order import Batch, BatchLayout, MicroBatch
from hvd_train.state import TrainState, confirm_equal
from hvd_train.updater import Updater, Votes
from hvd_train.world.world import LocalWorld, World
from tests.support import runs
from tests.support.runs import equal, largest_difference, small_config, trained
from tests.support.worlds import own_generator

TOLERANCE = 1e-5
KINDS = [(runs.convnet, "adamw"), (runs.batch_norm, "sgd"), (runs.dropout, "sgd"), (runs.remembers, "sgd")]


@pytest.mark.parallel
@pytest.mark.parametrize(("make", "optimizer"), KINDS)
def test_ranks_and_one(world: World, make: Callable[[int], nn.Module], optimizer: str) -> None:
    """N ranks take the same step as one rank with the same global batch: equal weights after 50 steps to 1e-5."""
    rate = {"sgd": 0.05, "adamw": 0.003}[optimizer]
    config = small_config(optimizer=optimizer, learning_rate=rate, clip_norm=5.0)
    alone, expected = trained(LocalWorld(), config.replace(output_dir=Path("alone")), make)
    result, weights = trained(world, config.replace(output_dir=Path("ranks")), make)
    assert (alone.steps, result.steps) == (50, 50)
    assert largest_difference(weights, expected) <= TOLERANCE
    assert all(equal(weights, other) for other in world.gather(weights)), "ranks hold different bits"
    assert (result.scores["top1"], result.best_epoch) == (alone.scores["top1"], alone.best_epoch)
    assert result.scores["loss"] == pytest.approx(alone.scores["loss"], abs=TOLERANCE)


@pytest.mark.parallel
def test_timing_changes_no_bit(world: World) -> None:
    """Gradients are ready at other times on each rank."""
    config = small_config(epochs=2)
    _, expected = trained(world, config.replace(output_dir=Path("prompt")), runs.deep)
    late = functools.partial(runs.late, runs.deep, seed=world.place.rank)
    _, weights = trained(world, config.replace(output_dir=Path("late")), late)
    assert equal(weights, expected)


@pytest.mark.parallel
def test_an_overflow_on_the_wire_skips_the_step_on_every_rank(world: World) -> None:
    """The fp16 wire and a large loss scale overflow: no rank steps, and all halve the scale."""
    rank, size = world.place.rank, world.place.size
    model = own_generator(runs.convnet(10))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scaler.scale(torch.ones(()))
    optimizer = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, "fp16")
    state = TrainState(model, {"": optimizer}, scaler, BatchLayout(4, 4))
    # Only the last rank has a micro-batch: no other rank's own gradient could overflow.
    micro = MicroBatch(0, np.arange(4), (torch.ones(4, 1, 8, 8), torch.arange(4)))
    batch = Batch(4, 1, (micro,) if rank == size - 1 else ())
    step = Updater(Config(), world, model, torch.device("cpu"), {"": runs.TRAINING})
    step.take(state, batch, Votes())
    if size > 1:  # one rank sends nothing
        assert equal(before, dict(model.state_dict()))
        assert world.gather(scaler.get_scale()) == [2.0**39] * size
    for _ in range(40):
        step.take(state, batch, Votes())
    assert not equal(before, dict(model.state_dict()))
    confirm_equal(state, world)
