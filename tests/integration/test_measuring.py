"""Run `bench` and `--profile` with real launchers, and the commands of docs/measuring.md as printed."""

import gzip
import json
import signal
from pathlib import Path

import pytest

from tests.support import jpegs
from tests.support.launching import HVD_TRAIN, PROJECT, commands, launch_line, output_of, ranks_of, started, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_scaling_on_one_and_two_workers(tmp_path: Path) -> None:
    """Each size is trained; after Ctrl-C the same command resumes."""
    line = "bench scaling --np 1,2 digits --epochs 4 --commit-steps 1 --device cpu --output-dir out"
    command = [HVD_TRAIN, *line.split()]
    with started(command, tmp_path, tmp_path / "output.txt") as process:
        commits = tmp_path / "out/np-2/checkpoints"
        wait_for("a commit", lambda: list(commits.glob("*.ckpt")) or process.poll() is not None)
        workers = ranks_of(process, "train")
        process.send_signal(signal.SIGINT)
        assert process.wait(150) == 130
        wait_for("the workers to end", lambda: not any(worker.is_running() for worker in workers))
    assert "Traceback" not in (tmp_path / "output.txt").read_text()
    output_of(command, tmp_path)
    assert "resuming at epoch" in (tmp_path / "out/np-2.log").read_text()
    rows = json.loads((tmp_path / "out/scaling.json").read_text())["rows"]
    found = [(row["workers"], row["global_batch_size"], row["steps_per_epoch"], row["failed"]) for row in rows]
    assert found == [(1, 64, 23, None), (2, 128, 12, None)]
    assert all(row["val_loss"] and row["top1"] and row["epoch_seconds"] and row["efficiency"] for row in rows)
    assert {"scaling.csv", "scaling.txt", "throughput.png"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("line", [line for lines in commands("measuring.md").values() for line in lines])
def test_a_documented_command(line: str, tmp_path: Path) -> None:
    """A command of docs/measuring.md runs as printed."""
    jpegs.digits(tmp_path / "data", classes=range(2), most=40)
    (tmp_path / "hostfiles").symlink_to(PROJECT / "hostfiles")
    output_of(["bash", "-c", line.replace("DATA", "data")], tmp_path)


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_two_ranks_are_traced(launcher: str, tmp_path: Path) -> None:
    command = launch_line(launcher, 2, HVD_TRAIN, "train", "digits", "--epochs", "1", "--profile", "4:6")
    output = output_of([*command, "--output-dir", "run"], tmp_path)
    assert "profile of steps 4 to 6: run/profile/steps-4-to-6-rank-0.json.gz" in output
    files = tmp_path / "run/profile"
    for rank in range(2):
        trace = json.loads(gzip.decompress((files / f"steps-4-to-6-rank-{rank}.json.gz").read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"} <= names
