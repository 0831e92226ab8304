"""Trainings with optimizers of the user's own: on ranks as on one, and resumed to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.elastic import Hosts, Kill
from tests.support.fault_plays import ONE, THREE, TWO, check, play, undisturbed
from tests.support.own_optimizers import HERE
from tests.support.runs import equal, largest_difference, small_config, trained
from tests.support.worlds import StoppingWorld, run_ranks

pytestmark = pytest.mark.numeric

OWN: dict[str, dict[str, Any]] = {
    "class": {"optimizer": f"{HERE}:Signs", "optimizer_args": ("beta=0.9", "power=0.3")},
    "function": {"optimizer": f"{HERE}:by_layer", "optimizer_args": ("head=0.1",), "learning_rate": 0.01},
    "rates of its own": {"optimizer": f"{HERE}:own_rates"},
    "torch's": {"optimizer": "torch.optim:NAdam", "learning_rate": 0.01, "decay_of": "weights"},
}
# Those whose steps are no larger than their gradients: Adam's would make a whole step of a rounding.
EVEN = ("class", "rates of its own")


@pytest.mark.parametrize("kind", EVEN)
def test_ranks_and_one(kind: str) -> None:
    """Two ranks take the same steps as one rank with the same global batch, and hold the same bits."""
    config = small_config(epochs=2, ema_decay=0.9, **OWN[kind])
    _, expected = trained(LocalWorld(), config.replace(output_dir=Path("alone")), runs.deep)
    (_, weights), (_, others) = run_ranks(
        2, lambda world: trained(world, config.replace(output_dir=Path("ranks")), runs.deep)
    )
    assert largest_difference(weights, expected) <= 1e-5
    assert equal(weights, others)


@pytest.mark.parametrize("kind", OWN)
def test_stopped_and_resumed(kind: str) -> None:
    """Stopped in mid epoch and resumed, with parameters that thaw, a run is bit-identical to one never stopped."""
    config = small_config(epochs=3, ema_decay=0.9, freeze="0.*", unfreeze=("1:0.*",), **OWN[kind])
    _, expected = trained(LocalWorld(), config.replace(output_dir=Path("undisturbed")))
    config = config.replace(output_dir=Path("stopped"))
    for stop in (7, 9):
        assert not trained(StoppingWorld(after=stop), config)[0].finished
    result, weights = trained(LocalWorld(), config)
    assert result.finished
    assert equal(weights, expected)
    best = [torch.load(Path(name) / "model-best.pt", weights_only=True) for name in ("stopped", "undisturbed")]
    assert equal(*best)


@pytest.mark.parametrize("kind", EVEN)
def test_workers_come_and_die(kind: str) -> None:
    """Newcomers get its state, plain numbers in it too: the weights are those of a training that nothing disturbed."""
    job, folder = play([Kill(7, rank=0), Hosts(12, (ONE, TWO, THREE))], ONE, TWO, **OWN[kind])
    assert 3 in job.sizes
    check(job, folder, undisturbed(**OWN[kind]))
