"""That a state has arrived is not believed but proven, whatever carried it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor
from typing_extensions import override

from hvd_train.errors import ReplicasDiffer
from hvd_train.transfer import synchronize
from hvd_train.world.world import unwatched
from tests.support.worlds import ThreadWorld, run_ranks
from tests.unit.story.test_state import state_after


class LosesHalf(ThreadWorld):
    """A network that says all has arrived, and on one rank leaves out the second half of the tensors."""

    @override
    def broadcast_tensors(
        self, tensors: Sequence[Tensor], root: int, arrived: Callable[[int], None] = unwatched
    ) -> None:
        before = [tensor.clone() for tensor in tensors]
        super().broadcast_tensors(tensors, root, arrived)
        if self.place.rank == 2:
            for tensor, old in list(zip(tensors, before, strict=True))[len(tensors) // 2 :]:
                tensor.copy_(old)


@pytest.mark.parametrize("keep", [False, True])
def test_a_state_that_has_arrived_by_half_is_found_before_a_step_is_taken(keep: bool) -> None:
    """All ranks end with the number of the one that has it; an error that was reported as done has been seen."""

    def body(world: ThreadWorld) -> str:
        state = state_after(3 if world.place.rank == 0 else 1, seed=world.place.rank)
        with pytest.raises(ReplicasDiffer) as told:
            synchronize(state, world, 0, keep=keep and world.place.rank > 0)
        return str(told.value)

    for message in run_ranks(3, body, kind=LosesHalf):
        assert message.startswith("ranks 2 hold other weights than rank 0 at step 3;")
