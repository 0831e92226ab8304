"""The training state: snapshot, load and digest."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvd_train.config import OptimizerConfig
from hvd_train.errors import RankDiffers, ReplicasDiffer, UsageError
from hvd_train.history import HEAD, TAIL
from hvd_train.network import optim
from hvd_train.network.device import LossScaler
from hvd_train.network.digest import digest_of
from hvd_train.progress.order import BatchLayout
from hvd_train.replicas import confirm_equal
from hvd_train.state import Answer, Evaluation, TrainState
from hvd_train.tasks.task import Scores
from tests.support import runs
from tests.support.states import scaler, state_after
from tests.support.worlds import ThreadWorld, own_generator, run_ranks


def complete() -> TrainState:
    """Return a state with moments, a moving average, a loss scale and odd buffers."""
    model = nn.Sequential(runs.Remembers(), nn.Flatten(), own_generator(nn.Linear(64, 10)))
    scaler = LossScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = optim.MovingAverage(model, 0.5)
    state = TrainState(model, {"": optimizer}, scaler, BatchLayout(20, 4), average=average)
    model(torch.ones(4, 1, 8, 8)).square().mean().backward()
    optimizer.step()
    state.count_step(runs.totals(), skipped=False)
    state.best = state.last = Evaluation(1, {"loss": 0.5, "top1": 0.75})
    state.come_to(0, TAIL, SimpleNamespace(level=3))
    state.history.results[0, TAIL, 0, 0] = Answer(
        Scores({"loss": 0.5}, 60, {"pairs": torch.ones(2, 2)})
    )
    return state


def weight(state: TrainState) -> nn.Parameter:
    return state.model.get_parameter("2.weight")


CHANGES = {
    "one bit of a weight": lambda state: (
        weight(state).data.view(torch.int32)[-1, -1].bitwise_xor_(1)
    ),
    "a buffer": lambda state: state.model.get_buffer("0.mean")[0, 0, 0].add_(1),
    "a moment": lambda state: state.optimizer.state[weight(state)]["exp_avg"][0, 0].add_(1),
    "the moving average": lambda state: state.result.get_parameter("2.weight").data[0, 0].add_(1),
    "the number of averaged steps": lambda state: state.average.n_averaged.add_(1),
    "the loss scale": lambda state: state.scaler.update(32.0),
    "the epoch": lambda state: setattr(state, "progress", replace(state.progress, epoch=1)),
    "the sums of the epoch": lambda state: setattr(state, "totals", runs.totals(top1=0.0)),
    "the layout": lambda state: setattr(state, "layout", BatchLayout(20, 5)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_states_that_differ_in_anything_have_different_digests(what: str) -> None:
    """Survivors with equal digests continue as one."""
    state = complete()
    digest = state.digest()
    assert complete().digest() == digest
    CHANGES[what](state)
    assert state.digest() != digest


def test_equal_tensors_have_the_same_digest() -> None:
    """In any order and memory format."""
    images = torch.arange(120.0).view(2, 3, 4, 5)
    head = torch.arange(6.0)
    lies = images.to(memory_format=torch.channels_last)
    expected = digest_of("step 3", {"body": images, "head": head}.items())
    assert digest_of("step 3", {"head": head, "body": lies}.items()) == expected


def test_later_steps_change_nothing_of_a_snapshot() -> None:
    """It can be loaded more than once."""
    state = complete()
    snapshot = state.snapshot()
    same = complete()
    for change in CHANGES.values():
        change(state)
    same.load(snapshot)
    assert same.digest() == complete().digest()
    state.load(snapshot)  # over a state that differs in everything
    assert state.digest() == same.digest()
    assert state.point == same.point
    (answer,) = state.history.results.values()
    assert torch.equal(answer.scores.total("pairs"), torch.ones(2, 2))


def test_a_rank_that_is_behind_keeps_what_its_code_has_set() -> None:
    """It gets weights, progress and what the last collective gave; a
    newcomer also gets the point.
    """
    ahead = complete()
    behind = complete()
    newcomer = complete()
    behind.best = Evaluation(2, {"loss": 0.25})
    behind.history.results.clear()
    ahead.best = None
    behind.optimizer.param_groups[0]["lr"] = 0.5
    ahead.optimizer.param_groups[0]["lr"] = 0.25
    ahead.come_to(1, HEAD, SimpleNamespace(level=4))
    behind.load(ahead.snapshot(), behind=True)
    newcomer.load(ahead.snapshot())
    assert behind.digest() == ahead.digest()
    assert (behind.best, behind.point.own) == (Evaluation(2, {"loss": 0.25}), {"level": 3})
    assert (newcomer.best, newcomer.point) == (None, ahead.point)
    assert [each.optimizer.param_groups[0]["lr"] for each in (behind, newcomer)] == [0.5, 0.25]
    assert [*behind.history.results] == [*newcomer.history.results] == [(0, TAIL, 0, 0)]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (3, r"^the weights of rank 1 differ from the others at step 1 \(model/5\.bias\)"),
        (
            4,
            r"^the weights of all ranks differ from the others at step 1",
        ),  # nobody knows which two are right
    ],
)
def test_ranks_that_deviate_are_named(ranks: int, says: str) -> None:
    def body(world: ThreadWorld) -> bool:
        state = state_after(1)
        if world.place.rank in (1, 3):
            state.model.get_parameter("5.bias").data.view(torch.int32)[0] ^= 1
        with pytest.raises(ReplicasDiffer, match=says) as raised:
            confirm_equal(state, world)
        return isinstance(raised.value, RankDiffers)

    assert run_ranks(ranks, body) == [ranks == 3 and rank == 1 for rank in range(ranks)]


def test_a_snapshot_of_another_model_is_refused() -> None:
    other = own_generator(runs.convnet(10))
    optimizer = torch.optim.AdamW(other.parameters())
    snapshot = TrainState(other, {"": optimizer}, scaler(), BatchLayout(1, 1)).snapshot()
    state = state_after(1)
    before = state.digest()
    with pytest.raises(
        UsageError, match=r"of another model: 0\.bias \(8,\) for absent.* and \d+ more; start it"
    ):
        state.load(snapshot)
    assert state.digest() == before


def test_a_snapshot_fits_another_memory_format() -> None:
    """A run may resume with or without --channels-last."""
    images = torch.cos(torch.arange(2 * 75.0)).view(2, 3, 5, 5)

    def fresh(memory_format: torch.memory_format) -> TrainState:
        model = own_generator(nn.Conv2d(3, 4, 3)).to(memory_format=memory_format)
        optimizer = optim.build(OptimizerConfig(optimizer="adamw"), model)
        return TrainState(model, {"": optimizer}, scaler(), BatchLayout(20, 4))

    def stepped(state: TrainState) -> torch.Tensor:
        state.model.zero_grad()
        state.model(images).square().sum().backward()
        state.optimizer.step()
        return state.model.weight

    for there, here in itertools.permutations((torch.channels_last, torch.contiguous_format)):
        first = fresh(there)
        second = fresh(here)
        stepped(first)
        second.load(first.snapshot())
        torch.testing.assert_close(stepped(second), stepped(first), atol=1e-6, rtol=1e-5)
