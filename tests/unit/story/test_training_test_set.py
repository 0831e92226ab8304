"""The test of the best weights on several ranks."""

from __future__ import annotations

from typing import TypeVar

import pytest
from torch import Tensor
from typing_extensions import override

from tests.support.runs import small_config, trained
from tests.support.worlds import ThreadWorld, run_ranks
from tests.unit.story.test_training_end import records, with_a_test_set

T = TypeVar("T")


class NoWeightsInMessages(ThreadWorld):
    """Threads that refuse messages with tensors in them: what is pickled is in memory three times on each rank."""

    @override
    def broadcast(self, value: T, root: int) -> T:
        assert not (isinstance(value, dict) and any(isinstance(item, Tensor) for item in value.values()))
        return super().broadcast(value, root)


def test_the_best_weights_travel_from_memory_to_memory() -> None:
    """Every rank tests the best weights, which no message has carried."""
    config = small_config(best_by="loss", learning_rate=0.5, schedule="constant", epochs=4)
    results = run_ranks(2, lambda world: trained(world, config, data=with_a_test_set)[0], kind=NoWeightsInMessages)
    best = min(record["val_loss"] for record in records("epoch"))
    assert [result.test["loss"] for result in results] == [pytest.approx(best, abs=1e-6)] * 2
