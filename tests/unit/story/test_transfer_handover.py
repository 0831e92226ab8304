"""What is given at once and what beside the steps, when ranks hand a state over, and on which terms."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from hvd_train import handover, transfer
from hvd_train.errors import ReplicasDiffer
from hvd_train.handover import Handover
from hvd_train.state import TrainState
from hvd_train.transfer import hand_over
from hvd_train.world.world import unwatched
from tests.support.worlds import ThreadWorld, run_ranks
from tests.unit.story.test_state import state_after, step


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have states of any size given beside the steps, in parts of 2,000 bytes."""
    monkeypatch.setattr(handover, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(handover, "PART_BYTES", 2000)


def given(state: TrainState, world: ThreadWorld, root: int = 1, *, has_it: bool, begin: int = 0) -> Handover:
    """Hand over all of a state, without steps between its parts."""
    giving = hand_over(state, world, root, has_it=has_it, begin=begin)
    while giving.is_under_way:
        giving.start_part()()
    return giving


@pytest.mark.usefixtures("any_size")
def test_a_state_is_handed_over_in_parts_bit_for_bit() -> None:
    """What is no part of a weight comes at once: statistics, counts and progress; a rank that has all keeps its own."""

    def body(world: ThreadWorld) -> tuple[str, bool, str]:
        state = state_after(1 if world.place.rank == 2 else 4, seed=world.place.rank // 2)
        before = state.digest()
        giving = hand_over(state, world, 1, has_it=world.place.rank < 2)
        assert giving.is_under_way
        assert state.progress.step == 4
        if world.place.rank < 2:
            assert state.digest() == before
        else:
            assert torch.equal(
                state.model.get_buffer("1.running_mean"), state_after(4).model.get_buffer("1.running_mean")
            )
        while giving.is_under_way:
            giving.start_part()()
        taken = state.digest()
        step(state, 9)
        return taken, giving.is_done, state.digest()

    outcomes = run_ranks(3, body)
    expected = state_after(4)
    taken = expected.digest()
    step(expected, 9)
    assert outcomes == [(taken, True, expected.digest())] * 3


@pytest.mark.usefixtures("any_size")
def test_elements_that_all_have_are_not_given_again() -> None:
    """A giver that goes on where the one before it was lost begins with the first element that is missing."""

    def body(world: ThreadWorld) -> tuple[int, int]:
        state = state_after(2)
        if world.place.rank == 0:
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.view(-1)[-1] += 1.0
        giving = hand_over(state, world, 1, has_it=world.place.rank == 1, begin=100)
        begun = giving.arrived
        while giving.is_under_way:
            giving.start_part()()
        first, *_ = state.model.parameters()
        return begun, int((first == next(state_after(2).model.parameters())).sum()) - first.numel()

    ((of_newcomer, differing), (of_giver, none)) = run_ranks(2, body)
    assert (of_newcomer, of_giver, none) == (100, 100, 0)
    assert differing == -1  # the last element of the first weight, of 72, was said to be there already


@pytest.mark.usefixtures("any_size")
def test_a_rank_that_has_the_state_takes_none_of_it() -> None:
    """It trains on with its own weights while the parts go by: what arrives is of the step before."""

    def body(world: ThreadWorld) -> tuple[bool, bool]:
        state = state_after(2 if world.place.rank < 2 else 1)
        giving = hand_over(state, world, 1, has_it=world.place.rank < 2)
        if world.place.rank == 0:
            state.model.get_parameter("0.weight").data += 1
        before = state.digest()
        while giving.is_under_way:
            giving.start_part()()
        return state.digest() == before, state.digest() == state_after(2).digest()

    assert run_ranks(3, body) == [(True, False), (True, True), (False, True)]


@pytest.mark.parametrize(("spare", "parts"), [(0, False), (-1, True)])
def test_a_state_of_so_many_bytes_is_given_beside_the_steps(
    spare: int, parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes no longer than another meeting is given while all wait, and found to be equal."""
    units = transfer._units(state_after(1))
    monkeypatch.setattr(handover, "AT_ONCE_BYTES", handover.num_bytes(units) + spare)

    def body(world: ThreadWorld) -> tuple[bool, bool]:
        state = state_after(1 + world.place.rank)
        giving = hand_over(state, world, 1, has_it=world.place.rank == 1)
        return giving.is_under_way, state.digest() == state_after(2).digest()

    assert run_ranks(2, body) == [(parts, not parts), (parts, True)]


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_would_give_other_parts_give_all_at_once(odd: int) -> None:
    """A weight that lies in memory otherwise on one of them, whichever that is, has its elements in another order."""

    def body(world: ThreadWorld) -> tuple[bool, bool]:
        state = state_after(3 if world.place.rank == 1 else 1)
        if world.place.rank == odd:
            weight = state.model.get_parameter("0.weight")
            weight.data = torch.empty(*weight.shape[:-1], 2 * weight.shape[-1])[..., ::2].copy_(weight.data)
        giving = hand_over(state, world, 1, has_it=world.place.rank == 1)
        return giving.is_under_way, all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(state.model.parameters(), state_after(3).model.parameters(), strict=True)
        )

    assert run_ranks(3, body) == [(False, True)] * 3


class LosesTheLast(ThreadWorld):
    """A network that says all has arrived, and leaves out the last tensor on rank 0."""

    @override
    def broadcast_tensors(self, tensors: Sequence[Tensor], root: int, arrived: object = unwatched) -> None:
        before = tensors[-1].clone()
        super().broadcast_tensors(tensors, root, arrived)  # type: ignore[arg-type]
        if self.place.rank == 0:
            tensors[-1].copy_(before)


def test_what_is_given_at_once_is_proven() -> None:
    """As when all ranks begin together."""

    def body(world: ThreadWorld) -> None:
        state = state_after(1 + world.place.rank, seed=world.place.rank)
        with pytest.raises(ReplicasDiffer):
            hand_over(state, world, 1, has_it=world.place.rank == 1)

    run_ranks(2, body, kind=LosesTheLast)


@pytest.mark.usefixtures("any_size")
def test_the_giver_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It alone, by the bytes of what goes beside the steps."""
    monkeypatch.setattr(transfer, "_QUIET_S", 0.0)
    monkeypatch.setattr(transfer, "_EVERY_S", 0.0)
    run_ranks(3, lambda world: given(state_after(1 + world.place.rank % 2), world, has_it=world.place.rank == 1))
    told = [line for line in capsys.readouterr().err.splitlines() if "beside training" in line]
    units = transfer._units(state_after(1))
    assert len(told) == -(-sum(len(unit[0]) for unit in units) * 12 // 2000)
    assert all(line.startswith("hvd-train: handing over the state beside training: 0 of 0 MB after") for line in told)


def test_states_of_other_numbers_of_tensors_are_no_pairs() -> None:
    """Rather an error than a state of which a part is left out."""
    outlines = transfer._outlined([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ValueError, match="shorter"):
        list(transfer._pairs(outlines, [torch.zeros(2)]))
    with pytest.raises(ValueError, match="longer"):
        list(transfer._pairs(outlines, [torch.zeros(2), torch.zeros(3), torch.zeros(1)]))


def test_a_tensor_on_an_accelerator_is_received_where_the_own_weights_are() -> None:
    """The giver's device has another number, or is none of this machine; what is on the host stays there."""
    state = state_after(1)
    state.model.register_buffer("unsaved", torch.zeros(3), persistent=False)
    outline = transfer._outlined(state.live())
    on_gpu = transfer.Outline((7,), (1,), torch.float32, on_host=False)
    outline["buffers"] = [*outline["buffers"][:-1], on_gpu]
    outline["optimizer"]["state"][0]["exp_avg"] = transfer.Outline((8, 1, 3, 3), (9, 9, 3, 1), torch.float32, False)
    with torch.no_grad():
        state.model.to("meta")
    live = transfer._room_for(state, outline)
    assert (live["buffers"][-1].shape, live["buffers"][-1].device.type) == ((7,), "meta")
    assert transfer.Outline.of(torch.zeros(2, device="meta")) == transfer.Outline((2,), (1,), torch.float32, False)
