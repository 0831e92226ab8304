"""What tests of several modules of the story begin with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_train import checkpoint
from hvd_train.parts import Own, fresh_state, warm_parts
from hvd_train.progress.metrics import Totals
from hvd_train.run_files.durable import Permission
from hvd_train.state import Snapshot, TrainState
from hvd_train.world.world import LocalWorld
from tests.support.runs import convnet, few_digits, small_config


@pytest.fixture
def state() -> Iterator[TrainState]:
    """A state after seven steps."""
    config, world = small_config(), LocalWorld()
    parts, optimizer = warm_parts(config, world, Own(convnet, few_digits))
    state = fresh_state(config, world, parts, optimizer)
    for _ in range(7):
        state.count_step(Totals((1.0, 2.0, 1.0), 20), skipped=False)
    yield state
    parts.train_loader.close()


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The event that a disk waits for, before it takes any checkpoint."""
    event, write = threading.Event(), checkpoint.write

    def slow(path: Path, snapshot: Snapshot, permission: Permission) -> None:
        assert event.wait(30)
        write(path, snapshot, permission)

    monkeypatch.setattr(checkpoint, "write", slow)
    return event
