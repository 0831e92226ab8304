"""`horovodrun -np 2 python -m pytest tests/parallel` runs these tests; without
a launcher there are none.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hvd_train.launch import launcher
from hvd_train.world.world import World

if launcher.launched(os.environ) is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """All ranks that the launcher has started; they leave together at the end of the session."""
    from hvd_train.world.horovod_world import HorovodWorld

    class Stays(HorovodWorld):
        """`run.train` closes its world; MPI cannot be started twice in a process."""

        def close(self) -> None:
            """Stay; the next training is one of another program."""
            vars(self).pop("program", None)

    ranks = Stays()
    yield ranks
    HorovodWorld.close(ranks)


@pytest.fixture
def on_ranks(world: World) -> Callable[[Callable[[World], Any]], Any]:
    """Run a body on this rank; the other processes do the same."""
    return lambda body: body(world)


@pytest.fixture(autouse=True)
def _arithmetic_alike() -> None:
    """Use one thread, so that operators add in the same order in both runs."""
    torch.set_num_threads(1)
