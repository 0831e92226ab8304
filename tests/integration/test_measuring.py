"""Run `bench` and `--profile` with real launchers, and the commands of docs/measuring.md as printed."""

import json
import signal
from pathlib import Path

import pytest

from tests.support import jpegs, traces
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


def inside(span: traces.Event, outer: traces.Event) -> bool:
    return bool(outer["ts"] <= span["ts"] and span["ts"] + span["dur"] <= outer["ts"] + outer["dur"])


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_two_ranks_and_horovod_are_in_one_trace(launcher: str, tmp_path: Path) -> None:
    """Ranks take the same steps at the same time, and Horovod's reductions lie within them."""
    command = launch_line(launcher, 2, HVD_TRAIN, "train", "digits", "--epochs", "1", "--profile", "4:6")
    output = output_of([*command, "--output-dir", "run"], tmp_path)
    assert "profile of steps 4 to 6, on 2 of 2 ranks: run/profile/steps-4-to-6.json.gz" in output
    first, second, horovod = traces.read(tmp_path / "run" / "profile" / "steps-4-to-6.json.gz").values()
    spans = [span for of_tensor in horovod.values() for span in of_tensor]
    for name, began, step in zip(("step 4", "step 5", "step 6"), first["steps"], second["steps"], strict=True):
        assert began["name"] == step["name"] == name
        # No rank ends the reduction of a step before the other rank has begun its own.
        for rank, own, other in ((first, began, step), (second, step, began)):
            reduced = [span for span in rank["phases"] if span["name"] == "reduction" and inside(span, own)]
            assert all(span["ts"] + span["dur"] > other["ts"] for span in reduced)
        assert "ALLREDUCE" in {span["name"] for span in spans if inside(span, began)}
    assert "NEGOTIATE_ALLREDUCE" in {span["name"] for span in spans}
    assert any("grouped_allreduce" in tensor for tensor in horovod)
