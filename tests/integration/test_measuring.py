"""Run `bench` and `--profile` with real launchers, and the commands of docs/measuring.md as printed."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support import jpegs, traces
from tests.support.launching import (
    DOCS,
    HVD_TRAIN,
    PROGRAMS,
    commands,
    finished,
    launch_line,
    output_of,
    ranks_of,
    started,
    wait_for,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def scaling(folder: Path, line: str) -> tuple[int, str, list[dict[str, Any]]]:
    code, output = finished([HVD_TRAIN, "bench", "scaling", *line.split(), "--output-dir", "out"], folder)
    return code, output, json.loads((folder / "out/scaling.json").read_text())["rows"]


def test_scaling_on_one_and_two_workers(tmp_path: Path) -> None:
    """Each size is trained, and the repeated command trains nothing again."""
    line = "--np 1,2 digits --epochs 1 --device cpu"
    code, output, rows = scaling(tmp_path, line)
    assert code == 0, output
    one, two = rows
    assert (one["workers"], one["global_batch_size"], one["steps_per_epoch"], one["efficiency"]) == (1, 64, 23, 1.0)
    assert (two["workers"], two["global_batch_size"], two["steps_per_epoch"]) == (2, 128, 12)
    assert two["efficiency"] == pytest.approx(two["images_per_second"] / 2 / one["images_per_second"])
    assert all(row["val_loss"] and row["top1"] and row["epoch_seconds"] and row["failed"] is None for row in rows)
    assert {"scaling.csv", "scaling.txt", "throughput.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    summaries = [tmp_path / f"out/np-{n}/summary.json" for n in (1, 2)]
    assert [json.loads(path.read_text())["world_size"] for path in summaries] == [1, 2]
    written = [path.stat().st_mtime_ns for path in summaries]
    code, output, again = scaling(tmp_path, line)
    assert (code, again) == (0, rows), output
    assert [path.stat().st_mtime_ns for path in summaries] == written
    code, output, again = scaling(tmp_path, f"{line} --lr 0.5")
    assert (code, again) == (2, rows)
    assert "run with other settings (learning_rate: 0.5, not 0.1)" in output


def test_a_stopped_scaling_continues(tmp_path: Path) -> None:
    """Ctrl-C makes the workers commit and end; the same command resumes."""
    line = "--np 2 digits --epochs 8 --commit-steps 1 --device cpu"
    command = [HVD_TRAIN, "bench", "scaling", *line.split(), "--output-dir", "out"]
    with started(command, tmp_path, tmp_path / "output.txt") as process:
        wait_for("a commit", lambda: list(tmp_path.glob("out/np-2/checkpoints/*.ckpt")))
        workers = ranks_of(process, "train")
        process.send_signal(signal.SIGINT)
        assert process.wait(150) == 130
        wait_for("the workers to end", lambda: not any(worker.is_running() for worker in workers))
    assert "Traceback" not in (tmp_path / "output.txt").read_text()
    code, output, rows = scaling(tmp_path, line)
    assert code == 0, output
    assert rows[0]["top1"] > 0.2
    assert "resuming at epoch" in (tmp_path / "out/np-2.log").read_text()


@pytest.mark.parametrize("line", [line for lines in commands("measuring.md").values() for line in lines])
def test_a_documented_command(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of docs/measuring.md runs as printed, and its record has every number that the page explains."""
    jpegs.digits(tmp_path / "data", classes=range(2), most=40)
    (tmp_path / "hostfiles").symlink_to(ROOT / "hostfiles")
    monkeypatch.setenv("PATH", f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")
    output_of(["bash", "-c", line.replace("DATA", "data")], tmp_path)
    for path in tmp_path.glob("*.json"):
        found = json.loads(path.read_text())
        section = (DOCS / "measuring.md").read_text().partition(f": `{found['bench']}`\n")[2].partition("\n## ")[0]
        explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
        stages = {row["stage"] for row in found.get("stages", [])} | {"items", "decode", "collate", "transfer"}
        known = set(found) | {key for row in found.get("rows", []) for key in row} | stages | {"random"}
        assert explained <= known | {"numbers"}


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_two_ranks_and_horovod_are_in_one_trace(launcher: str, tmp_path: Path) -> None:
    """Ranks take the same steps at the same time, and Horovod's reductions lie within them."""
    command = launch_line(launcher, 2, HVD_TRAIN, "train", "digits", "--epochs", "1", "--profile", "4:6")
    output = output_of([*command, "--output-dir", "run"], tmp_path)
    assert "profile of steps 4 to 6, on 2 of 2 ranks: run/profile/steps-4-to-6.json.gz" in output
    first, second, horovod = traces.read(tmp_path / "run" / "profile" / "steps-4-to-6.json.gz").values()
    for name, began, step in zip(("step 4", "step 5", "step 6"), first["steps"], second["steps"], strict=True):
        assert began["name"] == step["name"] == name
        reduced = [
            [span["ts"] + span["dur"] for span in rank["phases"] if span["name"] == "reduction" and inside(span, own)]
            for rank, own in ((first, began), (second, step))
        ]
        # No rank ends the reduction of a step before the other rank has begun its own.
        assert all(end > other["ts"] for ends, other in zip(reduced, (step, began), strict=True) for end in ends)
        assert "ALLREDUCE" in {span["name"] for spans in horovod.values() for span in spans if inside(span, began)}
        # The other rank may ask before this rank begins its step, so that the trace of the first step lacks it.
        ended = {
            span["name"]
            for spans in horovod.values()
            for span in spans
            if inside({"ts": span["ts"] + span["dur"], "dur": 0}, began)
        }
        assert "NEGOTIATE_ALLREDUCE" in ended or name == "step 4"
    assert any("grouped_allreduce" in tensor for tensor in horovod)


def inside(span: traces.Event, outer: traces.Event) -> bool:
    return bool(outer["ts"] <= span["ts"] and span["ts"] + span["dur"] <= outer["ts"] + outer["dur"])
