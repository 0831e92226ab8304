"""The same training on all ranks of the launcher and on one rank alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_train.launch.workers import Request
from hvd_train.session import Session
from hvd_train.world.world import LocalWorld, World
from tests.support import programs, runs
from tests.support.runs import equal, largest_difference, small_config, trained

TOLERANCE = 1e-5
ADAMW = {"optimizer": "adamw", "learning_rate": 0.003, "clip_norm": 5.0}
SGD = {"clip_norm": 5.0}
FROZEN = {"freeze": "backbone", "unfreeze": ("1:1.*", "3:*")}
MIXES = {"mixup": 0.2, "cutmix": 1.0}
CLIPPED = {"ema_decay": 0.9, "clip_norm": 0.5, "decay_of": "weights"}
EVERYTHING = {
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
        (runs.dropout, ADAMW),
        (runs.batch_norm, CLIPPED),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (runs.remembers, SGD),
                (runs.batch_norm, FROZEN),
                (runs.batch_norm, MIXES),
                (runs.batch_norm, {"channels_last": "on"}),
            )
        ),
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
    """Of the fp16 wire; no gradient of a rank overflows. Later steps are taken."""
    skipped = []

    def program(session: Session, model: torch.nn.Module, *_: object) -> None:
        for step in session.steps():
            for micro in step:
                factor = 1e9 if step.number == 2 else 1.0
                micro.backward(factor * programs.losses(model, micro.batch))
            skipped.append(step.skipped)

    programs.played(world, program, compression="fp16")
    is_sent = world.place.size > 1  # one rank sends nothing
    assert skipped[:3] == [False, is_sent, False]


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
