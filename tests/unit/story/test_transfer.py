"""How the state of one rank becomes that of all: bit for bit, in place, and never half of it unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from hvd_train import handover
from hvd_train.errors import RankLost, ReplicasDiffer
from hvd_train.state import Evaluation
from hvd_train.transfer import hand_over, synchronize
from hvd_train.world.world import LocalWorld, unwatched
from tests.support.worlds import Killed, ThreadWorld, run_ranks
from tests.unit.story.test_state import state_after, step


class SmallPieces(ThreadWorld):
    """Threads among whom a state travels in many pieces."""

    most_bytes = 500


@pytest.mark.parametrize(("ahead", "keep"), [(0, False), (1, True), (2, False)])
def test_all_ranks_take_the_state_of_one(ahead: int, keep: bool) -> None:
    """The others get its weights, optimizer and progress, bit for bit, and continue alike."""

    def body(world: ThreadWorld) -> tuple[str, int, str]:
        rank = world.place.rank
        state = state_after(4 if rank == ahead else rank % 2, seed=rank)
        state.best = Evaluation(rank, 0.5, 0.5, 0.5)
        synchronize(state, world, ahead, keep=keep)
        taken = state.digest(), state.progress.step
        step(state, 9)
        return *taken, state.digest()

    ((digest, steps, after),) = set(run_ranks(3, body, kind=SmallPieces))
    expected = state_after(4, seed=ahead)
    expected.best = Evaluation(ahead, 0.5, 0.5, 0.5)
    assert (digest, steps) == (expected.digest(), 4)
    step(expected, 9)
    assert after == expected.digest()
    synchronize(expected, LocalWorld(), 0)
    assert after == expected.digest(), "alone there is nothing to synchronize"


def test_a_state_is_received_where_it_is_needed() -> None:
    """A state of many gigabytes has no second copy: parameters and moments stay where they are in memory."""

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
def test_a_rank_that_is_behind_keeps_its_state_until_it_has_the_other(keep: bool) -> None:
    """If the sender dies halfway, every bit is as before with `keep`, and always on a rank that held the same."""

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


class LosesTheLast(ThreadWorld):
    """A network that reports success, and leaves out the last tensor on rank 2."""

    @override
    def broadcast_tensors(
        self, tensors: Sequence[Tensor], root: int, arrived: Callable[[int], None] = unwatched
    ) -> None:
        before = tensors[-1].clone()
        super().broadcast_tensors(tensors, root, arrived)
        if self.place.rank == 2:
            tensors[-1].copy_(before)


@pytest.mark.parametrize("how", ["synchronize", "synchronize, keep", "hand over"])
def test_a_state_that_has_not_arrived_in_full_is_found(how: str) -> None:
    """All ranks end with the number of the rank that has it: an error may be reported as success."""

    def body(world: ThreadWorld) -> str:
        rank = world.place.rank
        state = state_after(3 if rank == 0 else 1, seed=rank)
        with pytest.raises(ReplicasDiffer) as told:
            if how == "hand over":
                hand_over(state, world, 0, has_it=rank == 0)
            else:
                synchronize(state, world, 0, keep=how.endswith("keep") and rank > 0)
        return str(told.value)

    for message in run_ranks(3, body, kind=LosesTheLast):
        assert message.startswith("ranks 2 hold other weights than rank 0 at step 3;")


def test_a_state_is_handed_over_in_parts_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics, counts and progress come at once; a rank that has the state keeps its own."""
    monkeypatch.setattr(handover, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(handover, "PART_BYTES", 2000)

    def body(world: ThreadWorld) -> tuple[str, bool, str]:
        state = state_after(1 if world.place.rank == 2 else 4, seed=world.place.rank // 2)
        before = state.digest()
        giving = hand_over(state, world, 1, has_it=world.place.rank < 2)
        assert giving.is_under_way
        assert state.progress.step == 4
        if world.place.rank < 2:
            assert state.digest() == before
        else:
            mine, theirs = (one.model.get_buffer("1.running_mean") for one in (state, state_after(4)))
            assert torch.equal(mine, theirs)
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
