"""Trainings that lose their terminal or reader."""

import json
import os
import pty
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.hosts import ROOT, arguments
from tests.support.launching import HVD_TRAIN, json_lines, launch_line, wait_for
from tests.support.on_demand import pace

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _models_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def journal(kind: str) -> list[dict[str, str]]:
    return [line for line in json_lines(Path("run/metrics.jsonl")) if line["kind"] == kind]


def test_a_terminal_that_goes_away_ends_in_a_commit() -> None:
    """All processes of the session get SIGHUPs; loader processes live until the last step."""
    pace(Path(), 0.01)
    train = [HVD_TRAIN, "train", *arguments(epochs=300), "--commit-steps", "1000"]
    train += ["--data", "tests.support.runs:mapped_digits", "--workers", "2", "--progress", "bar"]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(train[0], train)
    wait_for("some steps", lambda: os.read(terminal, 10_000) and len(journal("step")) > 3)
    assert len(psutil.Process(process).children(recursive=True)) > 2
    os.close(terminal)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGHUP)
    assert psutil.Process(process).wait(200) in (129, None)
    message = journal("event")[-1]["message"]
    assert "stopped by SIGHUP" in message and "committed; the same" in message


@pytest.mark.parametrize("launcher", ["none", "gloo", "mpi"])
def test_a_reader_that_leaves_costs_the_lines_alone(launcher: str) -> None:
    """As in `hvd-train train | head -1`: the training finishes with exit code 0."""
    command = launch_line(launcher, 2, HVD_TRAIN, "train", *arguments(epochs=3))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert "on digits" in process.stdout.readline().decode()
        process.stdout.close()
        assert process.wait(280) == 0
    assert Path("run/model-final.pt").exists()
    assert json.loads(Path("run/summary.json").read_text())["finished"]
