"""Fixtures of the story."""

from collections.abc import Iterator

import pytest

from hvd_train.parts import Own, fresh_state, warm_parts
from hvd_train.state import TrainState
from hvd_train.world.world import LocalWorld
from tests.support.runs import convnet, few_digits, small_config, totals


@pytest.fixture
def state() -> Iterator[TrainState]:
    config = small_config()
    world = LocalWorld()
    parts, optimizer = warm_parts(config, world, Own(convnet, few_digits))
    state = fresh_state(config, world, parts, optimizer)
    for _ in range(7):
        state.count_step(totals(), skipped=False)
    yield state
    parts.train_loader.close()
