"""`hvd-train train --np` and `--hosts` on this machine: one command starts the ranks, and ends as they do."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.launching import HVD_TRAIN, finished, ranks_of, started, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]
RUN = ["--device", "cpu", "--output-dir", "run"]


@pytest.mark.parametrize(
    "ranks", [["--np", "2"], ["--hosts", "hosts"], ["--np", "2", "--controller", "mpi"]], ids=" ".join
)
def test_one_command_starts_the_ranks(ranks: list[str], tmp_path: Path) -> None:
    """Without the environment on the PATH; the flags are no settings, and rank 0 prints as a single process does."""
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    bare = {"PATH": "/usr/bin:/bin"}
    code, output = finished([HVD_TRAIN, "train", "digits", "--epochs", "1", *ranks, *RUN], tmp_path, variables=bare)
    assert code == 0, output
    assert output.startswith("digits-convnet (0.09 M parameters) on digits (1,437 images), 2 ranks on cpu, ")
    assert "stdout" not in output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2
    settings = (tmp_path / "run" / "config.yaml").read_text()
    assert not {"np:", "hosts:", "controller:"} & set(settings.split())


def test_a_signal_stops_the_ranks_after_a_commit(tmp_path: Path) -> None:
    """The process is the launcher itself: it passes the signal on, and ends with its code."""
    command = [HVD_TRAIN, "train", "digits", "--epochs", "500", "--np", "2", *RUN]
    output = tmp_path / "output.txt"
    with started(command, tmp_path, output) as launcher:
        wait_for("the first epoch", lambda: output.exists() and "epoch   1/500" in output.read_text(), limit_s=200)
        assert len(ranks_of(launcher, "train")) >= 2
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(120) == 128 + signal.SIGTERM
    assert "committed; the same command goes on from there" in output.read_text()


def test_mistakes_of_the_ranks_are_those_of_the_command(tmp_path: Path) -> None:
    """Those that only a rank can see have one line and exit code 2, too."""
    code, output = finished([HVD_TRAIN, "train", "digits", "--np", "2", "--resume", "gone.ckpt", *RUN], tmp_path)
    assert code == 2
    assert output.count("--resume gone.ckpt: no such file") == 1
    assert not (tmp_path / "run").exists()
