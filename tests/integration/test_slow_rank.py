"""A rank that sleeps in every step is named, under real launchers."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import finished, launch_line, started, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "horovodrun_scripts" / "train_elastic.sh"
PROGRAM = [sys.executable, "-m", "tests.support.slow_rank"]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def slow_events(folder: Path) -> list[dict[str, Any]]:
    """Return what was said of slow ranks."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("name") == "slow"]


@pytest.mark.parametrize(
    ("launcher", "where", "cause", "words"),
    [("gloo", "forward", "compute", "forward and backward passes"), ("mpi", "data", "input", "input")],
)
def test_a_slow_rank_is_named_and_recovers(launcher: str, where: str, cause: str, words: str, tmp_path: Path) -> None:
    """Once, with its host, what it is slow in and the factor, and once when it is no longer slow."""
    code, output = finished(launch_line(launcher, 3, *PROGRAM, where, "1", "60", "240"), tmp_path, 150, ENVIRONMENT)
    assert code == 0, output
    slow, recovered = slow_events(tmp_path)
    host = socket.gethostname()
    assert [slow[key] for key in ("rank", "host", "cause", "recovered")] == [1, host, cause, False]
    assert [recovered[key] for key in ("rank", "host", "cause", "recovered")] == [1, host, None, True]
    assert 1.5 < slow["factor"] <= 4.5, "80 ms where the others have 20"
    (line,) = re.findall(rf"rank 1 on {host} is slow .*", output)
    assert words in line
    assert output.count(f"rank 1 on {host} is no longer slow") == 1


def test_nothing_is_left_of_a_slow_rank_that_leaves(tmp_path: Path) -> None:
    """It is named once; the world without it says no more of it, and of nobody else."""
    (tmp_path / "hosts").write_text("localhost:3\n")
    command = [str(SCRIPT), "--discover", "cat hosts", "-np", "2", "--env", "PYTHONPATH", "--env", "OMP_NUM_THREADS"]
    command += ["--", *PROGRAM, "optimizer", "2", "1000", "200"]
    output = tmp_path / "output.txt"
    with started(command, tmp_path, output, ENVIRONMENT):
        wait_for("the slow rank to be named", lambda: " is slow " in output.read_text())
        (tmp_path / "hosts").write_text("localhost:2\n")
        wait_for("the end of the training", lambda: "done: " in output.read_text(), 150)
    assert "world 3 -> 2" in output.read_text()
    (slow,) = slow_events(tmp_path)
    assert (slow["rank"], slow["cause"]) == (2, "update")
