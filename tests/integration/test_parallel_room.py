"""Runs tests/parallel by pytest itself under horovodrun, on every number of ranks and through both controllers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import parallel_room
from tests.support.runs import SHARED_WEIGHTS

RUNS = [("gloo", 2, "on"), ("gloo", 3, "off"), ("gloo", 1, "on"), ("gloo", 3, "on"), ("mpi", 2, "on")]


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("controller", "size", "shared_weights"), RUNS)
def test_the_parallel_room_passes_on_every_rank(
    controller: str, size: int, shared_weights: str, tmp_path: Path
) -> None:
    """The contract and the equivalence of rank numbers hold on Horovod; each rank runs each test."""
    parallel_room.passes(controller, size, tmp_path, {SHARED_WEIGHTS: shared_weights})
