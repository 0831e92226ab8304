"""A checkpoint takes no more memory than the state that is in it, however large that is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.launching import finished

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BESIDE = 30e6  # bytes: buffers of files and of torch, and pages of libraries that are used for the first time


def test_a_checkpoint_is_written_and_read_in_the_memory_of_its_state(tmp_path: Path) -> None:
    """Beside the state there is one copy of it at most, and to see whether a file is whole takes none."""
    growth: dict[str, int] = {}
    for ways in (["write"], ["check", "read"]):
        program = [sys.executable, "-m", "tests.support.checkpoint_memory", "240", str(tmp_path), *ways]
        code, output = finished(["env", f"PYTHONPATH={ROOT}", *program], tmp_path, limit_s=100)
        assert code == 0, output
        state, largest, *of_ways = map(int, output.split())
        growth |= zip(ways, of_ways, strict=True)
    assert max(growth.values()) < state + largest + BESIDE, growth
    assert growth["check"] < largest + BESIDE, growth
