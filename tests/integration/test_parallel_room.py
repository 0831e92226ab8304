"""Run tests/parallel under horovodrun, on several numbers of ranks and both controllers."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.launching import PROJECT, launch_line, output_of


@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("controller", "size", "everything"),
    [
        ("gloo", 2, False),  # without what is marked slow there
        *(
            pytest.param(*room, True, marks=pytest.mark.slow)
            for room in (("gloo", 1), ("gloo", 2), ("gloo", 3))
        ),
        pytest.param("mpi", 2, True, marks=pytest.mark.slow),
    ],
)
def test_the_parallel_room_passes_on_every_rank(
    controller: str, size: int, everything: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    options = "-q -x --color=no -p no:cacheprovider"
    test = [sys.executable, "-m", "pytest", *options.split(), f"{PROJECT}/tests/parallel"]
    test += [f"--rootdir={PROJECT}", f"-c={PROJECT}/pyproject.toml"]
    test += ["-m", "parallel or not parallel"] if everything else []
    line = launch_line(controller, size, *test)
    variables = {"PYTHONPATH": str(PROJECT), "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}
    output = output_of(line, tmp_path, limit_s=1400, variables=variables)
    counts = [int(count) for count in re.findall(r"\b(\d+) passed", output)]
    assert len(counts) == size, output[-6000:]
    assert len(set(counts)) == 1, counts
