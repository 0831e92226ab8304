"""Settings of a training on real ranks, compared with one rank or plain torch."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_train.progress.order import Batch, BatchLayout, MicroBatch
from hvd_train.state import TrainState
from hvd_train.updater import Updater, Votes
from hvd_train.world.world import LocalWorld, World
from tests.parallel.test_equivalence import TOLERANCE
from tests.support import runs
from tests.support.runs import equal, largest_difference, small_config, trained
from tests.support.worlds import STOP, own_generator

IN_THE_GATE = ("frozen", "accumulation, average, clipping")  # the slow tests run the others
ON_RANKS: dict[str, dict[str, Any]] = {
    "frozen": {"freeze": "backbone", "unfreeze": ("1:1.*", "3:*")},
    "mixes": {"mixup": 0.2, "cutmix": 1.0},
    "accumulation, average, clipping": {"ema_decay": 0.9, "clip_norm": 0.5, "decay_of": "weights"},
    "channels last": {"channels_last": "on"},
}
EVERYTHING: dict[str, Any] = {
    **ON_RANKS["mixes"], **ON_RANKS["frozen"], **ON_RANKS["accumulation, average, clipping"],
    "label_smoothing": 0.1, "precision": "bf16", "compression": "fp16",
    "sync_batch_norm": True, "channels_last": "on", "epochs": 2, "unfreeze": ("1:*",),
}  # fmt: skip


@pytest.mark.parallel
@pytest.mark.parametrize(
    "name", [name if name in IN_THE_GATE else pytest.param(name, marks=pytest.mark.slow) for name in ON_RANKS]
)
def test_ranks_and_one(world: World, name: str) -> None:
    """Weights are equal to one rank's after 50 steps to 1e-5, and bit-identical on all ranks."""
    config = small_config(**ON_RANKS[name])
    _, expected = trained(LocalWorld(), config.replace(output_dir=Path("alone")), runs.batch_norm)
    _, weights = trained(world, config.replace(output_dir=Path("ranks")), runs.batch_norm)
    assert largest_difference(weights, expected) <= TOLERANCE
    assert all(equal(weights, other) for other in world.gather(weights)), "ranks hold different bits"


class StopLast:
    """The same world, in which the last rank votes to stop after this many steps."""

    def __init__(self, world: World, after: int) -> None:
        self._world, self._left = world, after

    def __getattr__(self, name: str) -> object:
        return getattr(self._world, name)

    def start_sum(self, tensor: torch.Tensor, name: str) -> object:
        self._left -= name == "step"
        if (self._left, name) == (0, "step") and self._world.place.rank == self._world.place.size - 1:
            tensor[STOP] = 1.0
        return self._world.start_sum(tensor, name)


@pytest.mark.parallel
def test_a_stopped_run_resumes_bit_identically(world: World) -> None:
    """The last rank stops it in mid epoch."""
    config, after = small_config(**EVERYTHING), 13
    _, expected = trained(world, config.replace(output_dir=Path("whole")), runs.batch_norm)
    result, _ = trained(StopLast(world, after), config, runs.batch_norm)  # type: ignore[arg-type]
    assert (result.finished, result.steps) == (False, after)
    result, weights = trained(world, config, runs.batch_norm)
    assert (result.finished, result.steps) == (True, 20)
    assert equal(weights, expected)


@pytest.mark.parallel
def test_a_skipped_step_leaves_nothing_in_the_buckets(world: World) -> None:
    """The step after a gradient of NaN is taken, with clipping too."""
    model = own_generator(runs.convnet(10))
    optimizer = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    state = TrainState(model, {"": optimizer}, torch.amp.GradScaler("cpu", enabled=False), BatchLayout(4, 4))
    step = Updater(small_config(clip_norm=0.1), world, model, torch.device("cpu"), {"": runs.TRAINING})
    rank, size = world.place.rank, world.place.size
    skipped = []
    for pixel in (math.nan, 1.0):
        micro = MicroBatch(rank, np.arange(4), (torch.full((4, 1, 8, 8), pixel), torch.arange(4)))
        skipped.append(step.take(state, Batch(4 * size, size, (micro,)), Votes())[0].skipped)
    assert skipped == [True, False]
