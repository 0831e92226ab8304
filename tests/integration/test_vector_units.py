"""The numeric tests with fewer vector units: torch and its libraries then round in another order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
MARK = "pytestmark = pytest.mark.numeric"
# The vector unit that the processor needs, and the settings of torch, oneDNN and MKL that use no more.
_NAMES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
UNITS = {
    "sse4_1": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512bw": ("avx512", "AVX512_CORE", "AVX512"),
}


@pytest.mark.parametrize("unit", UNITS)
def test_numbers_hold_with_other_vector_units(unit: str, tmp_path: Path) -> None:
    """Every tolerance leaves room for the rounding of another processor."""
    if unit not in Path("/proc/cpuinfo").read_text().split():
        return  # the default tests run without this unit
    modules = [str(path) for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py")) if MARK in path.read_text()]
    assert modules
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "numeric and not slow", *modules],
        cwd=ROOT,
        env={**os.environ, **dict(zip(_NAMES, UNITS[unit], strict=True)), "PYTEST_DEBUG_TEMPROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout[-5000:]
