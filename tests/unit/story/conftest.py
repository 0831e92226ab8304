"""Fixtures of the story."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from hvd_train import checkpoint
from hvd_train.parts import fresh_state, warm_parts
from hvd_train.progress.metrics import Totals
from hvd_train.state import Snapshot, TrainState
from hvd_train.world.world import LocalWorld
from tests.support.runs import convnet, few_digits, small_config


@pytest.fixture
def state() -> Iterator[TrainState]:
    config, world = small_config(), LocalWorld()
    parts, optimizer = warm_parts(config, world, convnet, few_digits)
    state = fresh_state(config, world, parts, optimizer)
    for _ in range(7):
        state.count_step(Totals(1.0, 2.0, 3.0, 20), skipped=False)
    yield state
    parts.train_loader.close()


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that must be set before a checkpoint is written."""
    event, write = threading.Event(), checkpoint.write_into

    def slow(file: BinaryIO, snapshot: Snapshot) -> None:
        assert event.wait(60)
        write(file, snapshot)

    monkeypatch.setattr(checkpoint, "write_into", slow)
    return event
