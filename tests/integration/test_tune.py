"""`hvd-train tune` and `train --tuned` with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train.bench import tune
from hvd_train.launch import horovodrun
from hvd_train.launch.tuned import CYCLE, FUSION
from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_a_turn_and_autotune_on_two_ranks() -> None:
    """Ranks time their steps with the settings that they get, and Horovod's autotune ends."""
    ranks = tune.Ranks(horovodrun.line(2, None, "gloo"), [HVD_TRAIN, "tune", "digits", "--device", "cpu"], 0.3)
    # With patch C9 a cycle begins no sooner than a tenth of the cycle time after the one before: far above a step.
    assert 0 < ranks.seconds({}) < 0.36 < ranks.seconds({CYCLE: "4000"})
    found = ranks.autotuned()
    assert found is not None
    assert found.keys() == {FUSION, CYCLE}
    assert 0 <= int(found[FUSION]) <= 64 * 2**20
    assert 1 <= float(found[CYCLE]) <= 100


def test_a_run_reads_its_settings_before_its_ranks_meet(tmp_path: Path) -> None:
    """Settings are in force from the start: a long cycle time is felt in every step."""
    (tmp_path / "slow.env").write_text(f"{CYCLE}=400\n")
    command = launch_line("gloo", 2, HVD_TRAIN, "train", "digits", "--epochs", "1", "--output-dir", "run")
    code, output = finished([*command, "--tuned", "slow.env", "--log-steps", "1"], tmp_path)
    assert code == 0, output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # With patch C9 a cycle begins no sooner than a tenth of the cycle time after the one before.
    # One step may seem shorter, where this rank came late to the one before.
    times = [line["time"] for line in lines if line["kind"] == "step"]
    assert len(times) > 20
    assert times[-1] - times[0] > 0.036 * (len(times) - 1)


@pytest.mark.parametrize("arguments", [["--np", "1"], ["--np", "x"], ["--controller", "nccl"], ["--epoch", "3"]])
def test_a_mistake_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    """A wrong argument is one line with exit code 2, before any rank starts."""
    code, output = finished([HVD_TRAIN, "tune", "digits", *arguments], tmp_path)
    assert code == 2
    assert output.startswith("hvd-train: ")
    assert len(output.splitlines()) == 1


def test_a_bad_file_ends_all_ranks_with_one_line(tmp_path: Path) -> None:
    """The error about a bad file of settings names its line, and no run folder is made."""
    (tmp_path / "bad.env").write_text("HOROVOD_CYCLE_TIME=fast\n")
    command = launch_line("gloo", 2, HVD_TRAIN, "train", "digits", "--tuned", "bad.env", "--output-dir", "run")
    code, output = finished(command, tmp_path)
    assert code == 2
    lines = [line for line in output.splitlines() if "hvd-train: " in line]
    assert len(lines) == 1
    assert "bad.env, line 1: HOROVOD_CYCLE_TIME is 'fast'" in lines[0]
    assert not (tmp_path / "run").exists()
