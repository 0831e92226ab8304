"""What makes two states differ: all that decides about the steps to come and about what is written at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from hvd_train.network import optim
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import Cut
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.state import Evaluation, Progress, TrainState
from tests.support import runs
from tests.support.worlds import own_generator


def complete() -> TrainState:
    """A state with everything that one can have: moments, a moving average, a loss scale, odd buffers."""
    model = nn.Sequential(runs.Remembers(), nn.Flatten(), own_generator(nn.Linear(64, 10)))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = optim.moving_average(OptimizerConfig(ema_decay=0.5), model, ())
    state = TrainState(model, optimizer, scaler, Cut(20, 4), average=average)
    model(torch.ones(4, 1, 8, 8)).square().mean().backward()
    optimizer.step()
    optimizer.state[parameter(state)]["rounds"] = 1  # as some optimizers of users have it
    state.count_step(Totals((1.5, 1.0, 1.0), 20), skipped=False)
    state.best = state.last = Evaluation(1, {"loss": 0.5, "top1": 0.75})
    return state


def parameter(state: TrainState) -> nn.Parameter:
    """The weights of the last layer."""
    return state.model.get_parameter("2.weight")


CHANGES: dict[str, Callable[[TrainState], object]] = {
    "a weight": lambda state: parameter(state).data[0, 0].mul_(2),
    "a buffer": lambda state: state.model.get_buffer("0.mean")[0, 0, 0].add_(1),
    "a buffer in no state_dict": lambda state: state.model.get_buffer("0.unsaved")[0].add_(1),
    "a moment": lambda state: state.optimizer.state[parameter(state)]["exp_avg"][0, 0].add_(1),
    "a number of the optimizer's": lambda state: state.optimizer.state[parameter(state)].update(rounds=2),
    "the moving average": lambda state: state.result.get_parameter("2.weight").data[0, 0].add_(1),
    "the number of averaged steps": lambda state: state.average.n_averaged.add_(1),  # type: ignore[union-attr]
    "a buffer of the moving average": lambda state: state.result.get_buffer("0.unsaved")[0].add_(1),
    "the loss scale": lambda state: state.scaler.update(32.0),
    "the epoch": lambda state: setattr(state, "progress", replace(state.progress, epoch=1)),
    "skipped steps": lambda state: setattr(state, "progress", replace(state.progress, skipped_in_row=1)),
    "the sums of the epoch": lambda state: setattr(state, "totals", replace(state.totals, sums=(1.5, 0.0, 1.0))),
    "the cut": lambda state: setattr(state, "cut", Cut(20, 5)),
    "the best evaluation": lambda state: setattr(state, "best", Evaluation(1, {"loss": 0.5, "top1": 0.5})),
    "the last evaluation": lambda state: setattr(state, "last", None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_ranks_that_differ_in_anything_have_other_digests(what: str) -> None:
    """Survivors with equal digests go on as one; in what these leave out they would come apart unseen."""
    state = complete()
    digest, parts = state.digest(), state.digests()
    assert (complete().digest(), complete().digests()) == (digest, parts)
    CHANGES[what](state)
    assert state.digest() != digest
    assert len([name for name, part in state.digests().items() if part != parts[name]]) == 1


def test_a_snapshot_has_all_that_a_digest_proves() -> None:
    """A state that takes it over is equal, whatever it was before, and so is the step after it."""
    first, second = complete(), complete()
    for what, change in CHANGES.items():
        if what != "the cut":  # whatever is changed, of weights and else
            change(second)
    second.load(first.snapshot())
    assert second.digests() == first.digests()
    assert second.digest() == first.digest()


def test_later_steps_change_nothing_of_a_snapshot() -> None:
    """It is written while training goes on."""
    state = complete()
    snapshot, same = state.snapshot(), complete()
    for change in CHANGES.values():
        change(state)
    same.load(snapshot)
    assert same.digests() == complete().digests()


@pytest.mark.parametrize(("there", "here"), [(True, False), (False, True)])
def test_a_loss_scale_may_begin_or_end_with_a_checkpoint(there: bool, here: bool) -> None:
    """A run that goes on with another arithmetic takes the weights, and a scale of its own if it needs one."""
    first, second = complete(), complete()
    for state, enabled in ((first, there), (second, here)):
        state.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=enabled)
    second.progress = Progress()
    second.load(first.snapshot())
    assert second.progress == first.progress
    assert second.scaler.get_scale() == (16.0 if here else 1.0)


def test_skipped_steps_in_a_row_are_counted_over_the_end_of_an_epoch() -> None:
    """A run whose every step is skipped gives up, however short its epochs are."""
    progress = Progress().after_step(20, skipped=True).after_step(20, skipped=True)
    assert (progress.skipped, progress.skipped_in_row) == (2, 2)
    progress = progress.next_epoch().after_step(20, skipped=True)
    assert (progress.skipped, progress.skipped_in_row) == (3, 3)
    progress = progress.after_step(20)
    assert (progress.skipped, progress.skipped_in_row, progress.step) == (3, 0, 4)
