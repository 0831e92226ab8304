"""How the state of one rank becomes that of all: bit for bit, in place, and never half of it unnoticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hvd_train import transfer
from hvd_train.errors import RankLost, UsageError
from hvd_train.network import optim
from hvd_train.progress.order import Cut
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.state import Evaluation, TrainState
from hvd_train.transfer import synchronize
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.worlds import Killed, ThreadWorld, own_generator, run_ranks
from tests.unit.story.test_state import scaler, state_after, step


class SmallPieces(ThreadWorld):
    """Threads among whom a state travels in many pieces."""

    most_bytes = 500


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_all_ranks_take_the_state_of_any_one_of_them(ahead: int, keep: bool) -> None:
    """Whichever rank it is, the others get its weights, optimizer and progress, bit for bit, and go on alike."""

    def body(world: ThreadWorld) -> tuple[str, int, str]:
        rank = world.place.rank
        state = state_after(4 if rank == ahead else rank % 2, seed=rank)
        state.best = Evaluation(rank, {"loss": 0.5, "top1": 0.5})
        synchronize(state, world, ahead, keep=keep)
        taken = state.digest(), state.progress.step
        step(state, 9)
        return *taken, state.digest()

    ((digest, steps, after),) = set(run_ranks(3, body, kind=SmallPieces))
    expected = state_after(4, seed=ahead)
    expected.best = Evaluation(ahead, {"loss": 0.5, "top1": 0.5})
    assert (digest, steps) == (expected.digest(), 4)
    step(expected, 9)
    assert after == expected.digest()


def test_alone_there_is_nothing_to_synchronize() -> None:
    """The world of one keeps its state."""
    state = state_after(2)
    synchronize(state, LocalWorld(), 0)
    assert state.digest() == state_after(2).digest()


def settings(name: str) -> Callable[[], TrainState]:
    """States of one training, with what each setting adds to them."""

    def fresh() -> TrainState:
        model: torch.nn.Module = own_generator(torch.nn.Conv2d(3, 4, 3))
        if name == "channels last":
            model = model.to(memory_format=torch.channels_last)
        config = OptimizerConfig(optimizer="sgd" if name == "sgd" else "adamw", ema_decay=0.9)
        optimizer = optim.build(config, model)
        if name == "amsgrad":
            optimizer = torch.optim.Adam(model.parameters(), amsgrad=True, capturable=False)
        if name == "lbfgs":
            optimizer = torch.optim.LBFGS(model.parameters())
        if name == "gap":
            model.register_buffer("every_other", torch.zeros(8)[::2])
        if name in ("average", "in no state_dict"):
            model.register_buffer("unsaved", torch.zeros(3), persistent=False)
        if name == "in no state_dict":
            model.register_buffer("grows", torch.zeros(0), persistent=False)
        average = optim.moving_average(config, model) if name == "average" else None
        return TrainState(model, optimizer, scaler(), Cut(20, 4), average=average)

    return fresh


@pytest.mark.parametrize(
    "name", ["sgd", "adamw", "amsgrad", "lbfgs", "channels last", "average", "gap", "in no state_dict"]
)
def test_what_a_state_may_be_made_of(name: str) -> None:
    """A newcomer's optimizer has no moments yet; it gets those of the root, of any kind and order in memory."""
    fresh = settings(name)

    def stepped(state: TrainState, number: int) -> None:
        def loss() -> torch.Tensor:
            state.model.zero_grad()
            images = torch.cos(torch.arange(2 * 75.0).view(2, 3, 5, 5) * (number + 1))
            value = state.model(images).square().mean()
            value.backward()
            return value

        loss()
        state.optimizer.step(loss) if name == "lbfgs" else state.optimizer.step()
        for buffer in state.model.buffers():
            buffer += number
        if name == "in no state_dict":
            state.model.grows = torch.cat([state.model.get_buffer("grows"), torch.ones(1)])
        if state.average is not None:
            state.average.update_parameters(state.model)
        state.progress = state.progress.after_step(20)

    def body(world: ThreadWorld) -> tuple[str, str]:
        state = fresh()
        for number in range(3 if world.place.rank == 1 else 0):
            stepped(state, number)
        synchronize(state, world, 1)
        taken = state.digest()
        stepped(state, 5)
        return taken, state.digest()

    assert len(set(run_ranks(2, body, kind=SmallPieces))) == 1


def test_a_state_is_received_in_the_memory_it_is_for() -> None:
    """A state of many gigabytes has no second copy: neither the parameters nor moments that are there move."""

    def body(world: ThreadWorld) -> bool:
        state = state_after(2, seed=world.place.rank)

        def places() -> list[int]:
            moments = [value for values in state.optimizer.state.values() for value in values.values()]
            return [tensor.data_ptr() for tensor in (*state.model.parameters(), *moments)]

        before = places()
        synchronize(state, world, 0)
        return places() == before

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("keep", [True, False])
def test_who_is_behind_keeps_its_state_until_it_has_the_other(keep: bool) -> None:
    """The sender dies half-way: with `keep` every bit is as before, and a rank that held the same is so anyway."""

    class Dying(SmallPieces):
        def _exchange(self, name: str, value: object) -> list[object]:
            if name == "tensors" and self._turns[name] == 7 and self.place.rank == 0:
                raise Killed("half-way")
            return super()._exchange(name, value)

    def body(world: ThreadWorld) -> tuple[bool, int]:
        state = state_after(3 if world.place.rank == 1 else 4)
        before = state.digest()
        with pytest.raises(RankLost):
            synchronize(state, world, 0, keep=keep and world.place.rank == 1)
        return state.digest() == before, state.progress.step

    _, behind, same = run_ranks(3, body, kind=Dying)
    assert behind == (keep, 3)
    assert same == (True, 4)


def test_a_state_of_another_model_is_refused_before_anything_is_changed() -> None:
    """The tensors that differ are named."""

    def body(world: ThreadWorld) -> None:
        state = state_after(1)
        if world.place.rank == 0:
            other = own_generator(runs.convnet(10))
            state = TrainState(other, torch.optim.AdamW(other.parameters()), scaler(), state.cut)
        before = state.digest()
        try:
            synchronize(state, world, 0)
        finally:
            assert state.digest() == before

    with pytest.raises(UsageError, match=r"of another model: 0\.bias \(8,\) for absent"):
        run_ranks(2, body)


def test_a_state_of_another_optimizer_is_refused() -> None:
    """Different parameter groups are an error of use, not a traceback."""

    def body(world: ThreadWorld) -> None:
        state = state_after(1)
        if world.place.rank == 0:
            state.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        synchronize(state, world, 0)

    with pytest.raises(UsageError, match="of another optimizer"):
        run_ranks(2, body)


def test_the_user_is_told_how_far_a_long_transfer_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the root alone, at a calm pace, and not at all where it is over in a moment."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for seconds, num_bytes in ((1.0, 0.1), (2.5, 0.3), (2.0, 0.2), (9.0, 0.6)):
        if now[0] == 100.0:
            told = transfer._Told(int(4.5e9), "sending the state to 2 ranks")
        now[0] += seconds
        told(int(num_bytes * 1e9))
    assert capsys.readouterr().err.splitlines() == [
        "hvd-train: sending the state to 2 ranks: 0.4 of 4.5 GB after 4 s",
        "hvd-train: sending the state to 2 ranks: 1.2 of 4.5 GB after 14 s",
    ]
    told = transfer._Told(int(35e6), "sending the state to 1 rank")
    now[0] += 2.9
    told(int(35e6))
    assert capsys.readouterr().err == ""


def test_how_much_has_been_sent_is_told_by_the_root_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where every moment is a long one, it says to how many ranks; the bytes that it counts add up to the state."""
    monkeypatch.setattr(transfer, "_QUIET_S", 0.0)
    monkeypatch.setattr(transfer, "_EVERY_S", 1e9)
    counted: list[transfer._Told] = []
    made = transfer._Told.__init__

    def noted(self: transfer._Told, num_bytes: int, what: str) -> None:
        made(self, num_bytes, what)
        counted.append(self)

    monkeypatch.setattr(transfer._Told, "__init__", noted)
    for ranks, to in ((2, "1 rank"), (3, "2 ranks")):
        counted.clear()
        run_ranks(ranks, lambda world: synchronize(state_after(1), world, 1), kind=SmallPieces)
        (told,) = counted
        assert told._sent == told._num_bytes > 0
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"hvd-train: sending the state to {to}: 0 of 0 MB after ")


def test_alone_there_is_nothing_to_hand_over() -> None:
    """A world of one rank is a world in which all have the state, however large it is."""
    state = state_after(2)
    giving = transfer.hand_over(state, LocalWorld(), 0, has_it=True)
    assert (giving.arrived, giving.is_under_way, giving.is_done) == (0, False, False)
    assert state.digest() == state_after(2).digest()


def test_an_optimizer_with_more_used_weights_than_here_is_refused() -> None:
    """Its numbers for a weight that this rank's optimizer does not have are no traceback either."""

    def body(world: ThreadWorld) -> None:
        state = state_after(1)
        if world.place.rank == 0:
            extra = torch.nn.Parameter(torch.ones(1))
            extra.grad = torch.ones(1)
            state.optimizer.add_param_group({"params": [extra]})
            state.optimizer.step()
        synchronize(state, world, 0)

    with pytest.raises(UsageError, match="the state of the other ranks is of another optimizer: "):
        run_ranks(2, body)


def test_an_outline_fits_what_lies_in_memory_as_it_does() -> None:
    """Same lengths, number format and order in memory; the stride of a length of 1 does not count."""
    tensor = torch.zeros(2, 3, 4)
    outline = transfer.Outline.of(tensor)
    assert outline == transfer.Outline((2, 3, 4), (12, 4, 1), torch.float32, on_host=True)
    assert outline.fits(tensor)
    assert outline.fits(torch.nn.Parameter(tensor))
    others = (
        torch.zeros(2, 3, 5),
        tensor.double(),
        torch.zeros(2, 4, 3).transpose(1, 2),
        torch.zeros(2, 3, 8)[..., ::2],
    )
    assert not transfer.Outline.of(torch.zeros(2)).fits(torch.zeros(4)[::2])
    assert not any(outline.fits(other) for other in (*others, 0.5, None))
    assert transfer.Outline.of(torch.zeros(1, 3)).fits(torch.zeros(5, 3)[::5])
    last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    made = transfer.Outline.of(last).empty("cpu")
    assert (made.stride(), made.shape, made.dtype) == (last.stride(), last.shape, last.dtype)
    assert transfer.Outline.of(torch.zeros(8, dtype=torch.int64)[::2]).empty("cpu").stride() == (1,)


def test_nested_outlines_are_filled_with_what_is_there_or_with_room() -> None:
    """Own tensors that fit are used; others are made on the device, or on the host where they are on the host there."""
    there = {"moment": torch.ones(2), "step": torch.ones(()), "list": [torch.ones(3)], "rate": 0.5, "pair": (1, None)}
    outline = transfer._outlined(there)
    assert (outline["rate"], outline["pair"], type(outline["list"])) == (0.5, (1, None), list)
    moment = torch.zeros(2)
    mine = transfer._filled(outline, {"moment": moment, "step": torch.ones(1)}, torch.device("meta"))
    assert mine["moment"] is moment
    assert (mine["step"].shape, mine["step"].device.type) == ((), "cpu")
    assert (mine["rate"], mine["pair"], mine["list"][0].shape) == (0.5, (1, None), (3,))
    on_gpu = transfer.Outline((2,), (1,), torch.float32, on_host=False)
    assert transfer._filled(on_gpu, None, torch.device("meta")).device.type == "meta"
    pairs = list(transfer._pairs(outline, mine))
    assert [one for one, _ in pairs] == [outline["moment"], outline["step"], outline["list"][0]]
    assert [id(tensor) for _, tensor in pairs] == [id(mine["moment"]), id(mine["step"]), id(mine["list"][0])]


def test_what_belongs_to_a_weight_is_handed_over_with_it() -> None:
    """Its two moments and its place in the average, and no count of steps; a weight with gaps in memory is left out."""
    model = torch.nn.Linear(3, 2)
    model.register_parameter("gap", torch.nn.Parameter(torch.zeros(4)[::2]))
    config = OptimizerConfig(optimizer="adamw", ema_decay=0.9)
    optimizer, average = optim.build(config, model), optim.moving_average(config, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    units = transfer._units(TrainState(model, optimizer, scaler(), Cut(20, 4), average=average))
    expected = []
    assert average is not None
    averages = dict(average.module.named_parameters())
    for name in ("weight", "bias"):
        parameter = model.get_parameter(name)
        moments = optimizer.state[parameter]
        tensors = (parameter, moments["exp_avg"], moments["exp_avg_sq"], averages[name])
        expected.append([(tensor.data_ptr(), tensor.numel()) for tensor in tensors])
    assert [[(tensor.data_ptr(), len(tensor)) for tensor in unit] for unit in units] == expected


def test_all_ranks_have_copies_that_lie_alike_in_memory() -> None:
    """Of tensors in any layout, those with gaps too; and the sender's own stay as they are."""
    images = torch.arange(2.0 * 3 * 4 * 4).view(2, 3, 4, 4)
    sent = [images.to(memory_format=torch.channels_last), images[:1, :1].expand(5, 3, 4, 4), torch.arange(3), images.mT]

    def body(world: ThreadWorld) -> list[tuple[bool, tuple[int, ...]]]:
        mine = sent if world.place.rank == 1 else None
        received = transfer.copies(mine, world, 1, torch.device("cpu"))
        assert received is not None
        assert transfer.copies(None, world, 0, torch.device("cpu")) is None
        found = [(torch.equal(one, other), one.stride()) for one, other in zip(received, sent, strict=True)]
        received[0].zero_()
        return found

    of_ranks = run_ranks(3, body)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert all(equal for equal, _ in of_ranks[0])
    assert of_ranks[0][0][1] == sent[0].stride()
    assert sent[0].abs().sum() > 0
