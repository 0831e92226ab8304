"""Learning rates of whole trainings: what the journal says they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_train.checkpoint import newest_good
from hvd_train.network.digest import digest_of, tensors_in
from hvd_train.world.world import LocalWorld
from tests.support.own_optimizers import HERE as OPTIMIZERS
from tests.support.own_schedules import HERE
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import StoppingWorld, run_ranks


def rates(folder: str) -> list[float]:
    """The learning rate of each step."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["learning_rate"] for line in lines if line["kind"] == "step"]


# The middle of each step of 20 of 190 samples, the last one of an epoch of 10, in epochs.
MIDDLES = [epoch + (20 * step + (10 if step < 9 else 5)) / 190 for epoch in range(2) for step in range(10)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"schedule": "linear", "min_learning_rate": 0.01, "learning_rate": 0.05},
            [0.05 - 0.04 * middle / 2 for middle in MIDDLES],
        ),
        (
            {"schedule": "linear", "min_learning_rate": 0.01, "lr_scaling": "linear", "lr_base_batch": 40},
            [0.5 * (0.05 - 0.04 * middle / 2) for middle in MIDDLES],
        ),
        (
            {"schedule": f"{HERE}:triangle", "optimizer": f"{OPTIMIZERS}:own_rates"},
            [0.001 * (2 - 4 * abs(middle / 2 - 0.5)) for middle in MIDDLES],
        ),
    ],
    ids=["floor", "floor with the batch", "own"],
)
def test_the_rate_of_each_step(settings: dict[str, Any], expected: list[float]) -> None:
    """A function of samples seen, on two ranks; a user's groups have theirs scaled by it."""
    config = small_config(epochs=2, warmup_epochs=0.0, **settings)
    run_ranks(2, lambda world: trained(world, config))
    assert rates("run") == pytest.approx(expected, rel=1e-9)


@pytest.mark.numeric
@pytest.mark.parametrize("schedule", ["one-cycle", f"{HERE}:triangle"])
def test_stopped_and_resumed(schedule: str) -> None:
    """A run that goes on in mid epoch has the rates, and the bits, of one never stopped."""
    config = small_config(epochs=2, schedule=schedule)
    _, expected = trained(LocalWorld(), config.replace(output_dir=Path("undisturbed")))
    assert not trained(StoppingWorld(after=13), config)[0].finished
    _, weights = trained(LocalWorld(), config)
    assert equal(weights, expected)
    assert rates("run") == rates("undisturbed")


@pytest.mark.numeric
@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "constant", "optimizer": "adam", "learning_rate": 0.003},
        {"schedule": "step", "decay_epochs": (1.0, 3.0), "ema_decay": 0.9},
        {"schedule": f"{HERE}:halves"},
    ],
    ids=str,
)
def test_a_finished_run_goes_on_longer(settings: dict[str, Any]) -> None:
    """Two epochs and two more are a run of four: in rates, weights, moments, moving average and scores."""
    config = small_config(epochs=4, **settings)
    undisturbed, expected = trained(LocalWorld(), config.replace(output_dir=Path("undisturbed")))
    assert trained(LocalWorld(), config.replace(epochs=2))[0].finished
    longer, weights = trained(LocalWorld(), config.replace(resume="run", output_dir=None))
    assert equal(weights, expected)
    assert rates("run") == rates("undisturbed")
    state, of_undisturbed = (newest_good(Path(folder), print) or {} for folder in ("run", "undisturbed"))
    for name in ("model", "average", "optimizer"):
        assert digest_of(name, tensors_in(state[name])) == digest_of(name, tensors_in(of_undisturbed[name]))
    assert (state["progress"], state["best"]) == (of_undisturbed["progress"], of_undisturbed["best"])
    assert (longer.scores, longer.best_epoch, longer.why) == (undisturbed.scores, undisturbed.best_epoch, "done")
