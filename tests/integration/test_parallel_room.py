"""Run tests/parallel under horovodrun, on several numbers of ranks and both controllers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.contract import PROMISES

ROOT = Path(__file__).parents[2]
EVERYTHING = ["-m", "parallel or not parallel"]
ROOMS = {
    "gloo-2": ("gloo", 2, []),  # without what is marked slow there
    "gloo-1": ("gloo", 1, EVERYTHING),
    "gloo-2, everything": ("gloo", 2, EVERYTHING),
    "gloo-3": ("gloo", 3, EVERYTHING),
    "mpi-2": ("mpi", 2, EVERYTHING),
}


@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "name", [name if name == "gloo-2" else pytest.param(name, marks=pytest.mark.slow) for name in ROOMS]
)
def test_the_parallel_room_passes_on_every_rank(name: str, tmp_path: Path) -> None:
    """Each rank runs each test."""
    controller, size, chosen = ROOMS[name]
    programs = Path(sys.executable).parent
    command = [str(programs / "horovodrun"), "-np", str(size), f"--{controller}", sys.executable, "-m", "pytest"]
    options = ["-q", "-x", "--color=no", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *chosen]
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment["PYTEST_DEBUG_TEMPROOT"] = str(tmp_path)
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, *options, str(ROOT / "tests" / "parallel")],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    counts = [int(count) for count in re.findall(r"\b(\d+) passed", done.stdout)]
    assert len(counts) == size, done.stdout[-6000:]
    assert len(set(counts)) == 1, counts
    assert counts[0] > len(PROMISES), "the room holds more than the contract"
