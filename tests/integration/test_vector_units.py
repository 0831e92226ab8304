"""The numeric tests on lesser processors: torch and its libraries choose other code by the vector units they find.

Another order of additions, and multiplications that are rounded before they are added, change the last bits of a
number. A tolerance that comes from one processor shows here, and not on the first machine of somebody else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MARK = "pytestmark = pytest.mark.numeric"
# What the processor must have, and how torch itself, oneDNN and MKL are told to use no more.
_NAMES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
UNITS = {
    "sse4_1": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512bw": ("avx512", "AVX512_CORE", "AVX512"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "unit", [pytest.param(unit, marks=[] if unit == "sse4_1" else pytest.mark.long) for unit in UNITS]
)
def test_numbers_hold_with_other_vector_units(unit: str) -> None:
    """Every tolerance leaves room for the rounding of another processor."""
    if unit not in Path("/proc/cpuinfo").read_text().split():
        return  # this processor is a lesser one, and the default tests run on it
    modules = [str(path) for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py")) if MARK in path.read_text()]
    assert len(modules) >= 10
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "numeric and not slow", *modules],
        cwd=ROOT,
        env={**os.environ, **dict(zip(_NAMES, UNITS[unit], strict=True))},
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-5000:]
