"""A rendezvous: whether survivors agree, the state, which arrives whole or not at all, and
what the user reads.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor
from typing_extensions import override

from hvd_train.errors import RankLost, ReplicasDiffer
from hvd_train.membership import Change, Member, RankReport, change_between, decide
from hvd_train.replicas import send_state
from tests.support.states import state_after
from tests.support.worlds import Killed, ThreadWorld, run_ranks


@pytest.mark.parametrize("turn", [0, 7])
def test_a_rank_keeps_its_state_if_the_sender_dies(turn: int) -> None:
    """Also if it had the same state as the sender."""

    class Dying(ThreadWorld):
        most_bytes = 500

        def _exchange(self, name, value):
            if name == "tensors" and self._turns[name] == turn and self.place.rank == 0:
                raise Killed("half-way")
            return super()._exchange(name, value)

    def body(world):
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

    def body(world):
        rank = world.place.rank
        state = state_after(3 if rank == 0 else 1, seed=rank)
        before = state.digest()
        with pytest.raises(ReplicasDiffer, match=r"of rank 0 arrived damaged on ranks 2$"):
            send_state(state, world, 0)
        return state.digest() == before

    assert run_ranks(3, body, kind=LosesTheLast) == [True] * 3


A, B, C = (Member(host, 1) for host in "abc")


def survivor(member: Member, step: int, digest: str = "x") -> RankReport:
    place = (0, 2, step, 0)
    why = "a rank was lost"
    return RankReport(member, True, step, digest, reason=why, waits=place, state_at=place)


def test_survivors_of_one_step_with_different_weights_are_detected() -> None:
    """They may differ if their progress differs."""
    decide([survivor(A, 7), survivor(B, 6, digest="y"), RankReport(C)])
    with pytest.raises(ReplicasDiffer):
        decide([survivor(A, 7), survivor(B, 7, digest="y")])


def change(reports: list[RankReport], step: int = 7) -> Change:
    return change_between((A, B), reports, decide(reports).root, step=step)


def test_a_change_names_who_left_and_who_came() -> None:
    assert change_between((), [RankReport(A), RankReport(B)], 0, step=0) is None
    second = change([survivor(A, 7), RankReport(C)])
    who = "b (process 1) left and c (process 1) came"
    assert second.describe(1.23) == (
        f"world 2 -> 2 at step 7: {who} (a rank was lost); 1.2 s to the next step, 0 steps lost"
    )
    again = change([survivor(A, 7), survivor(B, 7)], step=5)
    assert again.describe(1.23).startswith("world 2 -> 2 at step 5: the same ranks again (a rank")
    assert again.steps_lost == 2


def test_a_change_is_what_the_most_advanced_rank_has_seen() -> None:
    earlier = replace(survivor(B, 5), reason="its network was away")
    found = change([earlier, survivor(A, 7)])
    assert (found.reason, found.steps_lost) == ("a rank was lost", 0)
