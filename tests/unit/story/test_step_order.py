"""The order of what a step does, and what its random numbers depend on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvd_train import Config
from hvd_train.progress.clock import Split
from hvd_train.state import Progress, to_host
from hvd_train.step import Votes
from hvd_train.world.world import LocalWorld
from tests.support.batches import batch_of
from tests.support.runs import equal
from tests.support.steps import TaskSteps
from tests.support.tasks import meter_of_classes
from tests.unit.story.test_step import CLIPPED, ROUNDINGS, InDoublePrecision, batch, by_hand, state_of, take

pytestmark = pytest.mark.numeric


class Draws(nn.Module):
    """Notes a random number of each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.numbers = nn.Linear(64, 10), list[float]()

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        self.numbers.append(float(torch.rand(())))
        logits: Tensor = self.linear(images.flatten(1))
        return logits


class OneLogit(nn.Module):
    """Its second class is impossible: a sample of it has an infinite loss, and gradients that are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        return torch.stack([self.weight * images[:, 0, 0, 0], torch.full((len(images),), -torch.inf)], 1)


def draws(seed: int, step: int) -> list[float]:
    """Return the random number of each of the four slots of a step."""
    model = Draws()
    state = state_of(LocalWorld(), model)
    state.progress = Progress(step=step)
    take(Config().replace(seed=seed), LocalWorld(), state, batch(8, 2))
    return model.numbers


def test_random_numbers_depend_on_seed_step_and_slot() -> None:
    """They are the same when the step is taken again, and differ between slots, steps and seeds."""
    first = draws(0, 0)
    assert draws(0, 0) == first
    assert len({*first, *draws(0, 1), *draws(1, 0)}) == 12


@pytest.mark.parametrize("scale", [1024.0, 65536.0])
def test_gradients_are_clipped_at_their_true_size(scale: float) -> None:
    """A loss scale, which multiplies every gradient, changes neither the norm nor the clipped step."""
    model = InDoublePrecision()
    state = state_of(LocalWorld(), model, scale=scale)
    result = take(Config().replace(clip_norm=0.1), LocalWorld(), state, batch(8, 8), norm=True)
    expected, norm = by_hand(8, 0.1)
    assert result.gradient_norm == pytest.approx(norm, rel=ROUNDINGS)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=CLIPPED)


def test_adasum_gets_the_mean_gradient_of_each_rank() -> None:
    """It combines means; half of a global batch gives the mean over that half, and no half of it."""
    config = Config().replace(reduction="adasum")
    alone = take(config, LocalWorld(), state_of(LocalWorld(), InDoublePrecision()), batch(4, 4), norm=True)
    micro, _ = batch(8, 4).micro_batches
    half = batch_of(8, 2, micro)
    model = InDoublePrecision()
    nn.functional.cross_entropy(model(micro.inputs), micro.targets).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    found = take(config, LocalWorld(), state_of(LocalWorld(), InDoublePrecision()), half, norm=True)
    assert alone.gradient_norm is not None
    assert found.gradient_norm == pytest.approx(float(norm), rel=ROUNDINGS)


def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradient_is_finite() -> None:
    """The samples are named, and no weight changes."""
    model = OneLogit()
    state = state_of(LocalWorld(), model)
    before = to_host(model.state_dict())
    (micro,) = batch(4, 4).micro_batches
    part = batch_of(4, 1, dataclasses.replace(micro, targets=torch.tensor([0, 1, 0, 0])))
    result = take(Config(), LocalWorld(), state, part)
    assert result.skipped
    assert result.not_finite == (1,)
    assert equal(to_host(model.state_dict()), before)


@pytest.mark.parametrize("slots", [1, 2])
def test_the_time_of_a_step_is_given_to_the_phases_it_belongs_to(slots: int) -> None:
    """Forward and backward for each slot; what is done meanwhile comes before the end of the wait for other ranks."""
    events: list[str | None] = []
    split, model = Split(), InDoublePrecision()
    split.listener = events.append
    step = TaskSteps(Config(), LocalWorld(), model, torch.device("cpu"), meter_of_classes(), split=split)
    part = batch(8, 8 // slots)
    step.take(
        state_of(LocalWorld(), model), part, Votes(), want_norm=False, meanwhile=lambda: events.append("meanwhile")
    )
    assert events == ["forward", "backward"] * slots + ["meanwhile", "reduction", "optimizer"]


def test_samples_whose_loss_is_not_finite_are_named_by_their_own_numbers() -> None:
    """Those of any slot of the rank, by their numbers in the data set rather than their places in the batch."""
    model = OneLogit()
    first, second = batch(8, 4).micro_batches
    part = batch_of(
        8,
        2,
        dataclasses.replace(first, targets=torch.tensor([0, 0, 0, 1]), samples=np.array([70, 61, 52, 43])),
        dataclasses.replace(second, targets=torch.tensor([1, 0, 1, 0]), samples=np.array([34, 25, 16, 7])),
    )
    result = take(Config(), LocalWorld(), state_of(LocalWorld(), model), part)
    assert result.not_finite == (43, 34, 16)


def test_a_weight_that_no_pass_uses_stays_and_is_not_in_the_way_of_clipping() -> None:
    """The norm of the gradient is that of the other weights, which are clipped as if they were all."""
    model = InDoublePrecision()
    unused = torch.tensor([0.3, 0.7], dtype=torch.float64)
    model.unused = nn.Parameter(unused.clone())
    state = state_of(LocalWorld(), model)
    result = take(Config().replace(clip_norm=0.1), LocalWorld(), state, batch(8, 4), norm=True)
    expected, norm = by_hand(8, 0.1)
    assert result.gradient_norm == pytest.approx(norm, rel=ROUNDINGS)
    assert torch.equal(model.unused, unused)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=CLIPPED)
