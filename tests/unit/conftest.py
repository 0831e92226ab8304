"""Fixtures of tests without a launcher: one core per rank, reproducible Hypothesis."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.launching import Program, write_program

QUIET = [HealthCheck.too_slow]
settings.register_profile(
    "unit", deadline=None, derandomize=True, database=None, max_examples=60, suppress_health_check=QUIET
)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each rank one core and torch one thread."""
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return a function that writes a shell script into a folder which is the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return lambda name, body: write_program(folder, name, body)
