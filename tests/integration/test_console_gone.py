"""Trainings that lose their terminal, session or reader."""

import json
import os
import pty
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.hosts import ROOT, arguments
from tests.support.launching import HVD_TRAIN, launch_line, wait_for
from tests.support.on_demand import pace

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TRAIN = [HVD_TRAIN, "train", *arguments(epochs=300, model="tests.support.on_demand:obedient"), "--commit-steps", "1000"]


def journal(kind: str) -> list[dict[str, str]]:
    path = Path("run/metrics.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


@pytest.fixture(autouse=True)
def _models_of_tests_that_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pace(Path(), 0.01)


def test_a_terminal_that_goes_away_ends_in_a_commit() -> None:
    """The session gets SIGHUP; the exit code says why the run ended."""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(TRAIN[0], [*TRAIN, "--progress", "bar"])

    def read() -> None:
        with suppress(OSError):
            while not gone.is_set():
                os.read(terminal, 1000)

    gone = threading.Event()
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    wait_for("some steps", lambda: len(journal("step")) > 3)
    gone.set()
    reader.join()
    os.close(terminal)
    assert psutil.Process(process).wait(200) in (129, None)
    messages = [event["message"] for event in journal("event")]
    assert any("stopped by SIGHUP" in message and "committed; the same" in message for message in messages)


def test_a_session_that_hangs_up_reaches_the_commit_with_its_loader_processes() -> None:
    """All processes get several SIGHUPs; loader processes must live until the last step."""
    train = [*TRAIN, "--data", "tests.support.runs:mapped_digits", "--workers", "2"]
    with subprocess.Popen(train, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        wait_for("some steps", lambda: len(journal("step")) > 3)
        assert len(psutil.Process(process.pid).children(recursive=True)) > 2
        for _ in range(3):
            os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(200) == 129
    assert "stopped by SIGHUP" in journal("event")[-1]["message"]


@pytest.mark.parametrize("launcher", ["none", "gloo", "mpi"])
def test_a_reader_that_leaves_costs_the_lines_alone(launcher: str) -> None:
    """As in `hvd-train train | head -1`: the training finishes with exit code 0."""
    Path("pace").unlink()
    command = launch_line(launcher, 2, HVD_TRAIN, "train", *arguments(epochs=3))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert "on digits" in process.stdout.readline().decode()
        process.stdout.close()
        assert process.wait(280) == 0
    assert Path("run/model-final.pt").exists()
    assert json.loads(Path("run/summary.json").read_text())["finished"]
