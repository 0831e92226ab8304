"""A state with more bytes than Horovod's counters hold."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.launching import launch_line, output_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_a_state_of_gigabytes_arrives_whole(tmp_path: Path, launcher: str) -> None:
    """The state has over 2**32 bytes; at most one more copy is in memory."""
    program = [sys.executable, "-m", "tests.support.large_state", "4.2"]
    line = launch_line(launcher, 2, *program)
    output = output_of(["env", f"PYTHONPATH={ROOT}", *line], tmp_path, limit_s=850)
    found = sorted(re.findall(r"rank (\d): step (\d+), (\w+), memory ([\d.]+) times", output))
    assert [words[:3] for words in found] == [("0", "7", "True"), ("1", "7", "True")]
    assert all(float(memory) < 2.5 for *_, memory in found), output
