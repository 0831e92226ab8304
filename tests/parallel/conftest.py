"""This room is run by a launcher: `horovodrun -np 2 python -m pytest tests/parallel`. Without one it is empty."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hvd_train.launch import launcher
from hvd_train.world.world import World
from tests.support.device import DEVICE

if launcher.launched(os.environ) is None:
    collect_ignore_glob = ["test_*.py"]


_exit_codes: list[int] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the exit code."""
    _exit_codes.append(int(session.exitstatus))


def pytest_unconfigure() -> None:
    """End as `hvd-train` does, at once: Horovod lets go of memory of a GPU only when torch has already gone."""
    if DEVICE.type == "cuda" and _exit_codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[0])


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """All ranks that the launcher has started; they leave together at the end of the session."""
    from hvd_train.world.horovod_world import HorovodWorld

    class Stays(HorovodWorld):
        """`run.train` closes its world; MPI cannot be started twice in a process."""

        def close(self) -> None:
            """Not yet."""

    ranks = Stays()
    yield ranks
    HorovodWorld.close(ranks)


@pytest.fixture(autouse=True)
def _own_device(world: World) -> None:
    """Tensors that name no GPU are on this rank's own: a training in the world of one takes the first one instead."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(world.place.local_rank)


@pytest.fixture
def on_ranks(world: World) -> Callable[[Callable[[World], Any]], Any]:
    """Runs a body on this rank; the other processes do the same."""
    return lambda body: body(world)
