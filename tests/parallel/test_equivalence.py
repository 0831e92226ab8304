"""The same training on all ranks of the launcher and on one rank alone."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_train.launch.workers import Request
from hvd_train.progress.order import Batch, BatchLayout, MicroBatch
from hvd_train.replicas import confirm_equal
from hvd_train.state import TrainState
from hvd_train.updater import Updater
from hvd_train.world.world import LocalWorld, World
from tests.support import runs
from tests.support.runs import equal, largest_difference, small_config, trained
from tests.support.worlds import own_generator

TOLERANCE = 1e-5
ADAMW = {"optimizer": "adamw", "learning_rate": 0.003, "clip_norm": 5.0}
SGD = {"clip_norm": 5.0}
FROZEN = {"freeze": "backbone", "unfreeze": ("1:1.*", "3:*")}
MIXES = {"mixup": 0.2, "cutmix": 1.0}
CLIPPED = {"ema_decay": 0.9, "clip_norm": 0.5, "decay_of": "weights"}
EVERYTHING: dict[str, Any] = {
    **MIXES,
    **CLIPPED,
    "freeze": "backbone",
    "unfreeze": ("1:*",),
    "label_smoothing": 0.1,
    "precision": "bf16",
    "compression": "fp16",
    "sync_batch_norm": True,
    "channels_last": "on",
    "epochs": 2,
}


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (runs.convnet, ADAMW),
        (runs.batch_norm, SGD),
        (runs.dropout, SGD),
        (runs.remembers, SGD),
        (runs.batch_norm, FROZEN),
        (runs.batch_norm, CLIPPED),
        pytest.param(runs.batch_norm, MIXES, marks=pytest.mark.slow),
        pytest.param(runs.batch_norm, {"channels_last": "on"}, marks=pytest.mark.slow),
    ],
)
def test_ranks_and_one(world: World, make: Any, settings: dict[str, Any]) -> None:
    """N ranks take the same step as one rank with the same global batch: equal
    weights after 50 steps to 1e-5.
    """
    config = small_config(**settings)
    alone, expected = trained(LocalWorld(), config.replace(output_dir=Path("alone")), make)
    result, weights = trained(world, config.replace(output_dir=Path("ranks")), make)
    assert (alone.steps, result.steps) == (50, 50)
    assert largest_difference(weights, expected) <= TOLERANCE
    assert all(equal(weights, other) for other in world.gather(weights)), (
        "ranks hold different bits"
    )
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
    """The fp16 wire and a large loss scale overflow: no rank steps, and all halve the scale.

    Later steps are taken.
    """
    rank = world.place.rank
    size = world.place.size
    model = own_generator(runs.convnet(10))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scaler.scale(torch.ones(()))
    world.wrap(model, "fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, {"": optimizer}, scaler, BatchLayout(4, 4))
    # Only the last rank has a micro-batch: no other rank's own gradient could overflow.
    micro = MicroBatch(0, np.arange(4), (torch.ones(4, 1, 8, 8), torch.arange(4)))
    batch = Batch(4, 1, (micro,) if rank == size - 1 else ())
    step = Updater(
        small_config(clip_norm=0.1), world, model, torch.device("cpu"), {"": runs.TRAINING}
    )
    step.take(state, batch)
    if size > 1:  # one rank sends nothing
        assert equal(before, dict(model.state_dict()))
        assert world.gather(scaler.get_scale()) == [2.0**39] * size
    for _ in range(40):
        step.take(state, batch)
    assert not equal(before, dict(model.state_dict()))
    confirm_equal(state, world)


class StopLast:
    """The same world, whose launcher asks the last rank for a stop after this many steps."""

    def __init__(self, world: World, after: int) -> None:
        self._world = world
        self._left = after

    def __getattr__(self, name: str) -> object:
        return getattr(self._world, name)

    def requested(self, *, got_signal: bool = False) -> Request:
        self._left -= 1
        is_last = self._world.place.rank == self._world.place.size - 1
        return "stop" if is_last and self._left == 0 else "train"


@pytest.mark.parallel
def test_a_stopped_run_resumes_bit_identically(world: World) -> None:
    """The last rank stops it in mid epoch."""
    config = small_config(**EVERYTHING)
    after = 13
    _, expected = trained(world, config.replace(output_dir=Path("whole")), runs.batch_norm)
    result, _ = trained(StopLast(world, after), config, runs.batch_norm)  # type: ignore[arg-type]
    assert (result.finished, result.steps) == (False, after)
    result, weights = trained(world, config, runs.batch_norm)
    assert (result.finished, result.steps) == (True, 20)
    assert equal(weights, expected)
