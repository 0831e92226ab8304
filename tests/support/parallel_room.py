"""Runs tests/parallel by pytest itself under horovodrun."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.contract import PROMISES
from tests.support.launching import finished, launch_line

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "tests" / "parallel"


def passes(launcher: str, size: int, folder: Path, variables: Mapping[str, str] = MappingProxyType({})) -> None:
    """Assert that each test of the room passes on each of so many ranks."""
    options = ["-q", "-x", "--color=no", "-p", "no:cacheprovider", f"--rootdir={ROOT}", f"-c{ROOT}/pyproject.toml"]
    command = launch_line(launcher, size, sys.executable, "-m", "pytest", *options, str(ROOM))
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DEBUG_TEMPROOT": str(folder), "PYTEST_ADDOPTS": ""}
    code, output = finished(command, folder, limit_s=570, variables={**own, **variables})
    assert code == 0, output[-6000:]
    counts = [int(count) for count in re.findall(r"\b(\d+) passed", output)]
    assert len(counts) == size, output[-6000:]
    assert len(set(counts)) == 1, counts
    assert counts[0] > len(PROMISES), "the room holds more than the contract"
