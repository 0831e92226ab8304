"""Fixtures of tests without a launcher: one core per rank, and the same examples of Hypothesis every time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from environment_setup.checkout import Checkout
from hypothesis import HealthCheck, settings

from tests.support.programs import Program, write_program

settings.register_profile(
    "room",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("room")


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each rank one core and torch one thread: the models here need no more."""
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


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Return a clone with everything that keys are made of, and nothing else."""
    root = tmp_path / "a clone"
    for folder in ("requirements", "packaging/patches", "packaging/horovod_build", "hvd_train/data"):
        (root / folder).mkdir(parents=True)
    sources = "horovod_sources/horovod/common"
    (root / "packaging" / sources).mkdir(parents=True)
    for name in ("constraints", "run", "build", "dev", "nvcc", "mpi"):
        (root / "requirements" / f"{name}.txt").write_text(f"{name}==1\n")
    (root / "requirements" / "constraints.txt").write_text("cuda-toolkit==13.2.2\n")
    recipe = ["build_horovod.py", "horovod_build/plan.py", "horovod.txt", "patches/C1.patch", "hook.cmake"]
    for name in (*recipe, f"{sources}/new.cc"):
        (root / "packaging" / name).write_text(name)
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "hvd_train" / "data" / "jpeg_region.c").write_text("int region;\n")
    (root / "hvd_train" / "data" / "jpeg_resize.h").write_text("int axis;\n")
    return Checkout(root)
