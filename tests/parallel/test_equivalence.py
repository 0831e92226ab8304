"""The same training on the ranks that the launcher has started and on one of them alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hvd_train.state import TrainState, confirm_equal
from hvd_train.world.world import LocalWorld, Reduction, World
from tests.support import runs
from tests.support.device import DEVICE, EPOCHS
from tests.support.runs import equal, largest_difference, small_config, trained
from tests.support.tasks import NUM_SUMS, meter_of_classes

TOLERANCE = 1e-5
KINDS = [*itertools.product((runs.convnet, runs.batch_norm, runs.dropout), ("sgd", "adamw")), (runs.remembers, "sgd")]


@pytest.fixture(autouse=True)
def _arithmetic_alike() -> None:
    """One thread on every rank: the sums inside an operation are then the same in both runs."""
    torch.set_num_threads(1)


@pytest.mark.parallel
@pytest.mark.parametrize(("make", "optimizer"), KINDS)
def test_ranks_and_one(world: World, make: Callable[[int], nn.Module], optimizer: str) -> None:
    """N ranks take the step of one rank with the same global batch: equal weights to 1e-5, after 50 steps on CPUs."""
    rate = {"sgd": 0.05, "adamw": 0.003}[optimizer]
    config = small_config(optimizer=optimizer, learning_rate=rate, clip_norm=5.0, epochs=EPOCHS)
    alone, expected = trained(LocalWorld(), config.replace(output_dir=Path("alone")), make)
    result, weights = trained(world, config.replace(output_dir=Path("ranks")), make)
    assert alone.steps == result.steps == 10 * EPOCHS
    assert largest_difference(weights, expected) <= TOLERANCE
    assert all(equal(weights, other) for other in world.gather(weights)), "ranks hold different bits"
    assert (result.scores["top1"], result.best_epoch) == (alone.scores["top1"], alone.best_epoch)
    assert result.scores["loss"] == pytest.approx(alone.scores["loss"], abs=TOLERANCE)


@pytest.mark.parallel
def test_stopped_and_resumed(world: World) -> None:
    """A run stopped in mid epoch by a wish of the last rank and resumed is bit-identical to one never stopped."""
    config = small_config(epochs=2)
    _, expected = trained(world, config.replace(output_dir=Path("undisturbed")), runs.batch_norm)
    stop = StopLast(world, after=7)
    result, _ = trained(stop, config, runs.batch_norm)
    assert (result.finished, result.steps) == (False, 7)
    result, weights = trained(world, config, runs.batch_norm)
    assert (result.finished, result.steps) == (True, 20)
    assert equal(weights, expected)


@pytest.mark.parallel
def test_timing_changes_no_bit(world: World) -> None:
    """Gradients that become ready at other times on each rank give the same sums, on any number of ranks."""
    config = small_config(epochs=2)
    _, expected = trained(world, config.replace(output_dir=Path("prompt")), runs.deep)
    late = functools.partial(runs.late, runs.deep, seed=world.place.rank)
    _, weights = trained(world, config.replace(output_dir=Path("late")), late)
    assert equal(weights, expected)


@pytest.mark.parallel
def test_an_overflow_on_the_wire_skips_the_step_on_every_rank(world: World) -> None:
    """With fp16 on the wire and a loss scale that is too large no rank steps, and all halve their scale."""
    from hvd_train import Config
    from hvd_train.data.batches import MicroBatch
    from hvd_train.progress.order import Cut
    from hvd_train.step import Votes
    from tests.support.batches import batch_of
    from tests.support.steps import TaskSteps
    from tests.support.worlds import own_generator

    rank, size = world.place.rank, world.place.size
    model = own_generator(runs.convnet(10)).to(DEVICE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**40)
    scaler.scale(torch.ones((), device=DEVICE))
    optimizer = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, Reduction(wire=torch.float16))
    state = TrainState(model, optimizer, scaler, Cut(4, 4))
    # Only the last rank has a slot: the others have no gradient of their own that could overflow.
    inputs, targets = torch.ones(4, 1, 8, 8, device=DEVICE), torch.arange(4, device=DEVICE)
    micro = MicroBatch(0, inputs, targets, np.arange(4))
    batch = batch_of(4, 1, *([micro] if rank == size - 1 else []))
    step = TaskSteps(Config(), world, model, DEVICE, meter_of_classes())
    step.take(state, batch, Votes(), want_norm=False)
    if size > 1:  # alone nothing travels
        assert equal(before, dict(model.state_dict()))
        assert world.gather(scaler.get_scale()) == [2.0**39] * size
    for _ in range(40):
        step.take(state, batch, Votes(), want_norm=False)
    assert not equal(before, dict(model.state_dict()))
    confirm_equal(state, world)


@pytest.mark.parallel
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_travels_as_bf16_and_skips_the_step_on_every_rank(world: World, value: float) -> None:
    """One number of the last rank's gradient is enough; the next step is taken by all, without a loss scale."""
    from hvd_train import Config
    from hvd_train.data.batches import MicroBatch
    from hvd_train.network.device import loss_scaler
    from hvd_train.progress.order import Cut
    from hvd_train.step import Votes
    from tests.support.batches import batch_of
    from tests.support.steps import TaskSteps
    from tests.support.worlds import own_generator

    rank, size = world.place.rank, world.place.size
    model = own_generator(runs.convnet(10)).to(DEVICE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = Config().replace(compression="bf16")
    scaler = loss_scaler(config, DEVICE)
    assert not scaler.is_enabled()
    optimizer = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, Reduction(wire=torch.bfloat16))
    state = TrainState(model, optimizer, scaler, Cut(4, 4))
    inputs, targets = torch.ones(4, 1, 8, 8, device=DEVICE), torch.arange(4, device=DEVICE)
    batch = batch_of(4, 1, *([MicroBatch(0, inputs, targets, np.arange(4))] if rank == size - 1 else []))
    step = TaskSteps(config, world, model, DEVICE, meter_of_classes())

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return torch.cat([gradient[:-1], torch.full_like(gradient[-1:], value)])

    (bias,) = [parameter for parameter in model.parameters() if parameter.shape == (10,)]
    hook = bias.register_hook(spoil)
    assert step.take(state, batch, Votes(), want_norm=False).skipped
    assert equal(before, dict(model.state_dict()))
    hook.remove()
    assert not step.take(state, batch, Votes(), want_norm=False).skipped
    assert not equal(before, dict(model.state_dict()))
    confirm_equal(state, world)


@pytest.mark.parallel
def test_a_training_with_gradients_as_bf16(world: World) -> None:
    """It learns; all ranks hold the same bits, after a stop and a resume as well."""
    config = small_config(epochs=EPOCHS, compression="bf16")
    _, plain = trained(world, config.replace(output_dir=Path("plain"), compression="none"), runs.batch_norm)
    whole, expected = trained(world, config.replace(output_dir=Path("whole")), runs.batch_norm)
    assert all(equal(expected, other) for other in world.gather(expected)), "ranks hold different bits"
    # Alone nothing travels. Else some weight has been rounded, on GPUs and CPUs.
    assert equal(plain, expected) is (world.place.size == 1)
    stopped, _ = trained(StopLast(world, after=7), config, runs.batch_norm)  # type: ignore[arg-type]
    assert (stopped.finished, stopped.steps) == (False, 7)
    resumed, weights = trained(world, config, runs.batch_norm)
    assert equal(weights, expected)
    assert resumed.scores["loss"] == whole.scores["loss"]
    assert whole.scores["loss"] < math.log(10) or EPOCHS == 1  # that of classes chosen by chance


class StopLast:
    """The same world, in which the last rank wishes to stop after so many steps."""

    def __init__(self, world: World, after: int) -> None:
        self._world, self._left = world, after

    def __getattr__(self, name: str) -> object:
        return getattr(self._world, name)

    def sum_with_gradients(self, optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> object:
        """With the wish in the last rank's votes."""
        self._left -= 1
        if self._left == 0 and self._world.place.rank == self._world.place.size - 1:
            tensor[NUM_SUMS] = 1.0
        return self._world.sum_with_gradients(optimizer, tensor)
