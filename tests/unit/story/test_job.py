"""The clocks of a training, and the time that a change of world takes."""

from __future__ import annotations

import time

import pytest

from hvd_train.elastic.members import Change, Member
from hvd_train.job import Arrival, Clocks
from hvd_train.launch.launcher import STARTED
from tests.support.runs import small_config


def test_the_time_limit_counts_from_the_start_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that joins after 50 of 60 minutes has 10 left, and one that joins after 61 has none."""
    config = small_config(max_time="1h")
    for minutes, due in ((50, False), (61, True)):
        monkeypatch.setenv(STARTED, str(time.time() - 60 * minutes))
        assert Clocks.of(config).time_limit.due == due
    monkeypatch.delenv(STARTED)
    assert not Clocks.of(config).time_limit.due


def test_a_change_of_world_counts_from_the_fault() -> None:
    """What this rank had waited when it reported, and the time since."""
    change = Change((Member("h1", 1),), (Member("h1", 1),), "a rank was lost", waited_s=2.0, step=7, steps_lost=0)
    arrival = Arrival(change, time.perf_counter() - 3.0)
    assert 5.0 <= arrival.seconds() < 65.0
