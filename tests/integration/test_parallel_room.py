"""Runs tests/parallel by pytest itself under horovodrun, on every number of ranks and through both controllers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.contract import PROMISES

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "tests" / "parallel"


ALONE = pytest.param("gloo", 1, marks=pytest.mark.slow)
MPI = pytest.param("mpi", 2, marks=pytest.mark.slow)


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("controller", "size"), [ALONE, ("gloo", 2), ("gloo", 3), MPI])
def test_the_parallel_room_passes_on_every_rank(controller: str, size: int, tmp_path: Path) -> None:
    """The contract and the equivalence of rank numbers hold on Horovod; each rank runs each test."""
    programs = Path(sys.executable).parent
    command = [str(programs / "horovodrun"), "-np", str(size), f"--{controller}", sys.executable, "-m", "pytest"]
    options = ["-q", "-x", "--color=no", "-p", "no:cacheprovider", f"--rootdir={ROOT}", str(ROOM)]
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment["PYTEST_DEBUG_TEMPROOT"] = str(tmp_path)
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=570,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    counts = [int(count) for count in re.findall(r"\b(\d+) passed", done.stdout)]
    assert len(counts) == size, done.stdout[-6000:]
    assert len(set(counts)) == 1, counts
    assert counts[0] > len(PROMISES), "the room holds more than the contract"
