"""The clocks of a training, and the time that a change of world takes."""

from __future__ import annotations

import time

import pytest

from hvd_train.elastic.members import Change, Member
from hvd_train.job import Arrival, Clocks
from hvd_train.launch.launcher import SPENT
from tests.support.runs import small_config


def test_the_time_limit_counts_from_the_start_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that joins after 20 of 60 minutes has 40 left, and one that joins after 61 has none.

    The time of day says nothing about that: the clocks of hosts may be minutes apart.
    """
    config, today = small_config(max_time="1h"), time.time
    for wrong_by in (0, -1200, 1200):
        monkeypatch.setattr(time, "time", lambda wrong_by=wrong_by: today() + wrong_by)
        for minutes, due in ((20, False), (61, True)):
            monkeypatch.setenv(SPENT, str(60 * minutes))
            assert Clocks.of(config).time_limit.due == due
        monkeypatch.delenv(SPENT)
        assert not Clocks.of(config).time_limit.due


def test_a_change_of_world_counts_from_the_fault() -> None:
    """What this rank had waited when it reported, and the time since."""
    change = Change((Member("h1", 1),), (Member("h1", 1),), "a rank was lost", waited_s=2.0, step=7, steps_lost=0)
    arrival = Arrival(change, time.perf_counter() - 3.0)
    assert 5.0 <= arrival.seconds() < 65.0
