"""`hvd-train replay` and `diff` on trainings of several ranks."""

import random
import re
import signal
from pathlib import Path

import pytest

from hvd_train.replay import replay
from hvd_train.world.world import LocalWorld
from tests.support.hosts import Training
from tests.support.launching import HVD_TRAIN, output_of, ranks_of, started, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]
FILES = ["--ledger", "--commit-steps", "10", "--keep-checkpoints", "1,every=10", "--output-dir"]


def test_steps_of_a_killed_run_are_replayed_on_one_process(tmp_path: Path) -> None:
    """A worker of three is killed and replaced; sums of other ranks are rounded in another way."""
    job = [HVD_TRAIN, "launch", "--elastic", "--np", "3", "--min-np", "3", "--"]
    training = ["train", "digits", "--epochs", "3", "--batch-size", "22"]
    with started([*job, *training, *FILES, "run"], tmp_path, tmp_path / "output.txt") as launcher:
        running = Training(tmp_path, launcher)
        running.after(20)
        ranks_of(launcher, "train")[-1].send_signal(signal.SIGKILL)
        wait_for("the end", lambda: launcher.poll() is not None, limit_s=280)
        assert launcher.returncode == 0, running.output
        assert running.changes, running.output
    run = tmp_path / "run"
    for number in sorted(random.Random(3).sample(range(11, running.steps + 1), 20)):
        (step,) = replay(run, range(number, number + 1), world=LocalWorld(), top=1)
        print(number, step.verdict)
        assert step.recorded is not None
        assert step.gap <= 1e-4
    output = output_of([HVD_TRAIN, "replay", "run", "--steps", "15:16"], tmp_path)
    assert output.count("sample ") == 6
    together = [HVD_TRAIN, "launch", "--np", "3", "--", "replay", "run", "--steps", "15:16"]
    lines = [line for line in output_of(together, tmp_path).splitlines() if "sample " in line]
    assert [line.split()[2] for line in lines] == re.findall(r"sample (\d+)", output)
    alone = [*training, "--global-batch-size", "66", *FILES, "alone"]
    output_of([HVD_TRAIN, *alone], tmp_path)
    output = output_of([HVD_TRAIN, "diff", "run", "alone"], tmp_path, code=1)
    assert "the runs part at step" in output
    assert "machine/world_size: 3, and 1" in output
