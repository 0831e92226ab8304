"""A job of two workers that are threads, for the tests of the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvd_train.elastic import orphans
from tests.support.dispatched import Job


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job of two workers on two hosts, which are started and have no ranks yet."""
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 0.01)
    monkeypatch.setattr("hvd_train.elastic.discovery._EVERY_S", 0.05)
    job = Job({"a": 1, "b": 1})
    job.start()
    yield job
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 0.01)
    job.interrupted.set()
    job.end()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The numbers of workers whose processes were killed, and their jobs."""
    numbers: list[str] = []
    monkeypatch.setattr(orphans, "kill_worker", lambda number, job: numbers.append(f"{number} of {job}"))
    return numbers
