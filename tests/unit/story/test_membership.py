"""A process at a rendezvous: its report, repeated faults, and the state, which
arrives whole or not at all.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from torch import Tensor
from typing_extensions import override

from hvd_train.errors import RankLost, ReplicasDiffer
from hvd_train.history import STEPS
from hvd_train.replicas import send_state
from hvd_train.state import Evaluation
from hvd_train.world.world import LocalWorld
from tests.support.states import state_after, step
from tests.support.worlds import Killed, ThreadWorld, run_ranks


class SmallPieces(ThreadWorld):
    most_bytes = 500


@pytest.mark.parametrize("root", [0, 1, 2])
def test_all_ranks_load_the_state_of_one(root: int) -> None:
    """They have its bits, and take the same next step."""

    def body(world: ThreadWorld) -> tuple[str, int, str]:
        rank = world.place.rank
        state = state_after(4 if rank == root else rank % 2, seed=rank)
        state.best = Evaluation(rank, {"loss": 0.5})
        state.come_to(0, STEPS, SimpleNamespace())
        send_state(state, world, root)
        taken = state.digest(), state.best.epoch
        step(state, 9)
        return *taken, state.digest()

    ((digest, best, after),) = set(run_ranks(3, body, kind=SmallPieces))
    expected = state_after(4, seed=root)
    assert (digest, best) == (expected.digest(), root)
    step(expected, 9)
    assert after == expected.digest()
    send_state(expected, LocalWorld(), 0)
    assert after == expected.digest()


@pytest.mark.parametrize("turn", [0, 7])
def test_a_rank_keeps_its_state_if_the_sender_dies(turn: int) -> None:
    """Also if it had the same state as the sender."""

    class Dying(SmallPieces):
        def _exchange(self, name: str, value: object) -> list[object]:
            if name == "tensors" and self._turns[name] == turn and self.place.rank == 0:
                raise Killed("half-way")
            return super()._exchange(name, value)

    def body(world: ThreadWorld) -> tuple[bool, int]:
        state = state_after(3 if world.place.rank == 1 else 4)
        before = state.digest()
        with pytest.raises(RankLost):
            send_state(state, world, 0)
        return state.digest() == before, state.progress.step

    assert run_ranks(3, body, kind=Dying)[1:] == [(True, 3), (True, 4)]


class LosesTheLast(ThreadWorld):
    """A network that reports success, but leaves out the last tensor on rank 2."""

    @override
    def broadcast_tensors(self, tensors: Sequence[Tensor], root: int) -> None:
        super().broadcast_tensors(tensors, root)
        if self.place.rank == 2:
            tensors[-1].zero_()


def test_a_damaged_state_is_not_loaded() -> None:
    """Horovod may report an error as success."""

    def body(world: ThreadWorld) -> bool:
        rank = world.place.rank
        state = state_after(3 if rank == 0 else 1, seed=rank)
        before = state.digest()
        with pytest.raises(
            ReplicasDiffer, match=r"the state of rank 0 arrived damaged on ranks 2$"
        ):
            send_state(state, world, 0)
        return state.digest() == before

    assert run_ranks(3, body, kind=LosesTheLast) == [True] * 3
