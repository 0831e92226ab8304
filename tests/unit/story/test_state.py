"""The state as one value: copy, load, digest, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hvd_train.errors import ReplicasDiffer, UsageError
from hvd_train.network import optim
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import Cut
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.state import Evaluation, Progress, Snapshot, TrainState, check_same_shapes, confirm_equal, first_few
from tests.support import runs
from tests.support.worlds import ThreadWorld, own_generator, run_ranks


def state_after(steps: int, *, seed: int = 0, optimizer: str = "adamw") -> TrainState:
    """A state with batch norm and a used optimizer."""
    model = own_generator(runs.batch_norm(10), seed)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    state = TrainState(model, kinds[optimizer](model.parameters(), lr=0.01), scaler(), Cut(20, 4))
    for number in range(steps):
        step(state, number)
    return state


def scaler() -> torch.amp.GradScaler:
    """As on a CPU without half precision."""
    return torch.amp.GradScaler("cpu", enabled=False)


def step(state: TrainState, number: int) -> None:
    """One step on made-up images."""
    images = torch.cos(torch.arange(4 * 64.0).view(4, 1, 8, 8) * (number + 1))
    state.optimizer.zero_grad()
    state.model(images).square().mean().backward()
    state.optimizer.step()
    state.progress = state.progress.after_step(20)
    state.totals += Totals((1.5, 1, 1), 20)


def test_progress_counts_steps_and_samples() -> None:
    """A step moves the cursor; the next epoch begins at zero and keeps counting steps."""
    assert Progress().after_step(20).after_step(10) == Progress(0, 30, 2)
    assert Progress(0, 30, 2).next_epoch() == Progress(1, 0, 2)


def test_a_snapshot_is_a_copy() -> None:
    """What a step changes afterwards, in weights, statistics or optimizer, is not changed in the snapshot."""
    state = state_after(2)
    snapshot = state.snapshot()
    weight, mean = snapshot["model"]["0.weight"].clone(), snapshot["model"]["1.running_mean"].clone()
    moment = snapshot["optimizer"]["state"][0]["exp_avg"].clone()
    step(state, 5)
    assert torch.equal(snapshot["model"]["0.weight"], weight)
    assert torch.equal(snapshot["model"]["1.running_mean"], mean)
    assert torch.equal(snapshot["optimizer"]["state"][0]["exp_avg"], moment)
    assert not torch.equal(state.model.state_dict()["0.weight"], weight)


def test_a_loaded_snapshot_becomes_the_state() -> None:
    """The optimizer goes on with the snapshot's own tensors, for a copy would be most of the state once more."""
    snapshot, state = state_after(2).snapshot(), state_after(1, seed=3)
    moments = [moment.data_ptr() for values in snapshot["optimizer"]["state"].values() for moment in values.values()]
    state.load(snapshot)
    assert state.digest() == state_after(2).digest()
    assert [moment.data_ptr() for values in state.optimizer.state.values() for moment in values.values()] == moments


def test_a_loaded_state_is_the_one_that_was_saved() -> None:
    """Progress, sums, best and last evaluation and the cut come back too."""
    state = state_after(3)
    state.best, state.last = Evaluation(1, {"loss": 0.5, "top1": 0.9}), Evaluation(2, {"loss": 0.6, "top1": 0.8})
    other = state_after(0)
    other.cut = Cut(7, 7)
    other.load(state.snapshot())
    assert (other.progress, other.totals, other.cut) == (Progress(0, 60, 3), Totals((4.5, 3, 3), 60), Cut(20, 4))
    assert (other.best, other.last) == (state.best, state.last)


def test_the_loss_scale_comes_back() -> None:
    """A resumed mixed-precision run does not start its search for the scale anew."""
    first, second = state_after(0), state_after(0)
    first.scaler, second.scaler = (torch.amp.GradScaler("cpu", init_scale=s) for s in (8.0, 1024.0))
    for state in (first, second):
        state.scaler.scale(torch.ones(()))
    second.load(first.snapshot())
    assert second.scaler.get_scale() == 8.0


@pytest.mark.parametrize("place", ["weight", "statistic", "optimizer"])
def test_the_digest_changes_with_one_bit(place: str) -> None:
    """One bit of one tensor is enough, be it a weight, a running statistic or an optimizer's moment."""
    state = state_after(1)
    before = state.digest()
    assert state.digest() == before
    tensors = {
        "weight": state.model.state_dict()["5.bias"],
        "statistic": state.model.state_dict()["1.running_var"],
        "optimizer": state.optimizer.state_dict()["state"][2]["exp_avg_sq"],
    }
    bits = tensors[place].view(torch.int32)
    bits[-1 if bits.dim() == 1 else (-1,) * bits.dim()] ^= 1
    assert state.digest() != before


def test_the_digest_changes_with_the_progress() -> None:
    """Equal weights at different steps are different states."""
    state = state_after(1)
    before = state.digest()
    state.progress = state.progress.after_step(1)
    assert state.digest() != before


def test_a_rank_that_deviates_is_named() -> None:
    """One bit in one rank's weights stops all ranks with the number of that rank."""

    def body(world: ThreadWorld) -> str:
        state = state_after(1)
        if world.place.rank == 2:
            state.model.state_dict()["0.weight"].view(torch.int32)[0] ^= 1
        with pytest.raises(ReplicasDiffer) as caught:
            confirm_equal(state, world)
        return str(caught.value)

    for message in run_ranks(3, body):
        assert message.startswith("ranks 2 hold other weights than rank 0 at step 1;")
        assert message.endswith("They differ: rank 2 in 0.weight")


DEVIATIONS: dict[str, Callable[[TrainState], None]] = {
    "1.running_var": lambda state: state.model.get_buffer("1.running_var").add_(1),
    "exp_avg of 5.bias": lambda state: state.optimizer.state[state.model[5].bias]["exp_avg"].add_(1),
    "6.unsaved": lambda state: state.model.get_buffer("6.unsaved").add_(1),
    "progress": lambda state: setattr(state, "progress", state.progress.after_step(1)),
    "cut": lambda state: setattr(state, "cut", Cut(7, 7)),
}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_what_deviates_is_named(name: str) -> None:
    """Whatever of the state it is, be it a tensor or not."""

    def body(world: ThreadWorld) -> str:
        state = state_after(1)
        state.model.append(runs.Remembers())
        if world.place.rank == 1:
            DEVIATIONS[name](state)
        with pytest.raises(ReplicasDiffer) as caught:
            confirm_equal(state, world)
        return str(caught.value)

    assert all(message.endswith(f"They differ: rank 1 in {name}") for message in run_ranks(2, body))


def test_buffers_that_are_in_no_state_dict_come_along() -> None:
    """With persistent=False a file of weights lacks them, but newcomers and resumed runs have them, averaged or not."""
    first, second = (
        TrainState(
            model := nn.Sequential(runs.Remembers(), nn.Linear(8, 2)),
            torch.optim.SGD(model.parameters()),
            scaler(),
            Cut(1, 1),
            average=optim.moving_average(OptimizerConfig(ema_decay=0.5), model, ("0.unsaved",)),
        )
        for _ in range(2)
    )
    for _ in range(2):
        first.model(torch.ones(4, 1, 8, 8))
        first.count_step(Totals((1.0, 1), 4), skipped=False)
    assert "0.unsaved" not in first.snapshot()["model"]
    second.load(first.snapshot())
    unsaved = [state.model.get_buffer("0.unsaved") for state in (first, second)]
    averages = [state.result.get_buffer("0.unsaved") for state in (first, second)]
    assert torch.equal(*unsaved)
    assert torch.equal(*averages)
    assert not torch.equal(unsaved[0], averages[0])
    second.digest()
    snapshot = first.snapshot()
    del snapshot["buffers"]  # as in checkpoints of old
    second.load(snapshot)


def test_a_snapshot_of_another_model_is_refused_and_changes_nothing() -> None:
    """The tensors that differ are named, and the weights stay as they were."""
    snapshot: Snapshot = TrainState(
        other := own_generator(runs.convnet(10)), torch.optim.AdamW(other.parameters()), scaler(), Cut(1, 1)
    ).snapshot()
    state = state_after(1)
    before = state.digest()
    with pytest.raises(UsageError, match=r"of another model: 0\.bias \(8,\) for absent.* and \d+ more; start it"):
        state.load(snapshot)
    assert state.digest() == before


def test_a_snapshot_of_another_optimizer_is_refused() -> None:
    """Different parameter groups are an error of use, not a traceback."""
    snapshot = state_after(1).snapshot()
    snapshot["optimizer"]["param_groups"][0]["params"].pop()
    with pytest.raises(UsageError, match="of another optimizer"):
        state_after(1).load(snapshot)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("there", [torch.channels_last, torch.contiguous_format])
def test_a_snapshot_of_weights_that_lie_otherwise_in_memory(name: str, there: torch.memory_format) -> None:
    """A run with --channels-last goes on without it, or the reverse, as if nothing had happened."""

    def fresh(memory_format: torch.memory_format) -> TrainState:
        model = own_generator(torch.nn.Conv2d(3, 4, 3)).to(memory_format=memory_format)
        return TrainState(model, optim.build(OptimizerConfig(optimizer=name), model), scaler(), Cut(20, 4))

    def stepped(state: TrainState) -> torch.Tensor:
        images = torch.cos(torch.arange(2 * 75.0).view(2, 3, 5, 5) * (state.progress.step + 1))
        state.model.zero_grad()
        state.model(images).square().sum().backward()
        state.optimizer.step()
        state.progress = state.progress.after_step(20)
        return state.model.weight.detach().clone()

    here = torch.contiguous_format if there is torch.channels_last else torch.channels_last
    first, second = fresh(there), fresh(here)
    stepped(first)
    second.load(first.snapshot())
    torch.testing.assert_close(stepped(second), stepped(first), atol=1e-6, rtol=1e-5)


def test_models_that_differ_are_told_apart_by_their_first_three_tensors() -> None:
    """In the order of their names, with both shapes; what one of them lacks is absent there."""
    mine = {"a": torch.ones(2), "b": torch.ones(3, 1), "c": torch.ones(4), "same": torch.ones(1)}
    theirs = {"a": torch.ones(7), "b0": torch.ones(()), "c": torch.ones(4), "same": torch.ones(1)}
    check_same_shapes(mine, dict(reversed(mine.items())))
    shown = "the checkpoint is of another model: a (7,) for (2,), b absent for (3, 1), b0 () for absent"
    advice = "; start it with the same --model and --data"
    for of_others, more in ((theirs, ""), ({**theirs, "c": torch.ones(5), "d": torch.ones(1)}, " and 2 more")):
        with pytest.raises(UsageError) as told:
            check_same_shapes(mine, of_others)
        assert str(told.value) == f"{shown}{more}{advice}"


def test_a_line_has_the_first_few_of_many() -> None:
    """Four unless another number is wanted, and how many are left out."""
    assert first_few([1, 2, 3, 4]) == "1, 2, 3, 4"
    assert first_few([1, 2, 3, 4, 5, 6]) == "1, 2, 3, 4 and 2 more"
    assert first_few(["a", "b", "c"], 1) == "a and 2 more"


def test_the_first_three_ranks_that_deviate_are_told_of() -> None:
    """All of their numbers, and of three of them in what they differ; who has only a part of the state is left out."""

    def body(world: ThreadWorld) -> str:
        state = state_after(1)
        if world.place.rank > 0:
            state.model.get_parameter("5.bias").data.view(torch.int32)[0] ^= 1
        with pytest.raises(ReplicasDiffer) as caught:
            confirm_equal(state, world, has_state=world.place.rank != 2)
        return str(caught.value)

    (told,) = set(run_ranks(6, body))
    assert told == (
        "ranks 1, 3, 4, 5 hold other weights than rank 0 at step 1; this must not happen: please report it with the "
        "run's config.yaml. They differ: rank 1 in 5.bias; rank 3 in 5.bias; rank 4 in 5.bias"
    )


def test_a_number_of_the_optimizer_for_no_weight_of_the_model_is_named_too() -> None:
    """A weight that the user's function added to the optimizer alone has no name of its own."""
    state = state_after(1)
    extra = nn.Parameter(torch.ones(2))
    extra.grad = torch.ones(2)
    state.optimizer.add_param_group({"params": [extra]})
    state.optimizer.step()
    names = [name for name in state.digests() if name.endswith(" of a parameter")]
    assert names == ["step of a parameter", "exp_avg of a parameter", "exp_avg_sq of a parameter"]
