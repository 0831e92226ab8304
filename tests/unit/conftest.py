"""Fixtures of tests without a launcher: one core per rank, no waits for disks, reproducible
Hypothesis.
"""

import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from socketserver import BaseServer

import pytest
import torch
from hypothesis import HealthCheck, settings

# Each training notes the versions of its packages; to read them takes longer than some trainings.
importlib.metadata.version = functools.cache(importlib.metadata.version)
QUIET = [HealthCheck.too_slow]
settings.register_profile(
    "unit",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=QUIET,
)
settings.load_profile("unit")
# A data set that raises can keep its loader process, which is given so long to end.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each rank one core and torch one thread."""
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})


@pytest.fixture(autouse=True)
def _no_wait_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave files in the memory of the system: no test cuts its power."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(autouse=True)
def _no_wait_for_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers of tests end at once: they look for it each half second."""
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (0.01,))


@pytest.fixture(autouse=True)
def _own_program() -> Iterator[None]:
    """Let each test be a program of its own, whose trainings no other test knows."""
    yield
    if loaded := sys.modules.get("hvd_train.run"):
        loaded._KEPT.clear()
