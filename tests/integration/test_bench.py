"""`hvd-train bench` with real launchers, and the commands of docs/measuring.md word for word."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support import jpegs
from tests.support.documented import commands, missing
from tests.support.launching import HVD_TRAIN, PROGRAMS, finished, launch_line, ranks_of, started, wait_for

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def bench(folder: Path, launcher: str, ranks: int, line: str) -> dict[str, Any]:
    """Run a measurement and return the record that it has written."""
    command = launch_line(launcher, ranks, HVD_TRAIN, "bench", *line.split(), "--json", "found.json")
    code, output = finished(command, folder)
    assert code == 0, output
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_throughput_of_two_ranks(tmp_path: Path) -> None:
    """Two ranks take the step together: their images add up, and the record says how it was made."""
    found = bench(tmp_path, "gloo", 2, "throughput digits --steps 5 --repetitions 2 --device cpu")
    assert (found["workers"], found["controller"], found["hosts"]) == (2, "Gloo", 1)
    assert found["images_per_second_per_worker"] == pytest.approx(found["images_per_second"] / 2, abs=0.01)
    assert found["global_batch_size"] / found["seconds_per_step"] == pytest.approx(found["images_per_second"], rel=0.5)
    assert found["split"]["reduction"] > 0
    assert found["tflops_per_worker"] == pytest.approx(
        found["gflop_per_image"] * found["images_per_second_per_worker"] / 1000, rel=1e-3
    )
    assert (found["not_counted"], found["peak_tflops"], found["mfu"]) == ("", None, None)
    assert {"horovod", "torch"} <= set(found["versions"])
    assert found["hardware"]["cores"] == len(os.sched_getaffinity(0))
    assert found["command"] == "hvd-train bench throughput digits --steps 5 --repetitions 2 --device cpu"


@pytest.mark.slow
def test_the_largest_batch_of_two_ranks(tmp_path: Path) -> None:
    """A rank that has no memory for a size is found out before the others wait for it, and all go on together."""
    variables = {"GREEDY": "above-40:1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    line = [HVD_TRAIN, "bench", "batch", "digits", "--device", "cpu", "--model", "tests.support.greedy:network"]
    line += ["--from", "16", "--to", "64", "--repetitions", "1", "--json", "found.json", "--plot", "found.svg"]
    code, output = finished(launch_line("gloo", 2, *line), tmp_path, variables=variables)
    assert code == 0, output
    found = json.loads((tmp_path / "found.json").read_text())
    assert missing(found) == set()
    assert (found["workers"], found["largest_that_fits"], found["ended_by"]) == (2, 40, "memory")
    assert [row["batch_size"] for row in found["rows"] if row["failed"] is None] == [16, 32, 40]
    assert "the largest that fits: batch 40 (44 does not)" in output
    assert (tmp_path / "found.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(("launcher", "name"), [("gloo", "Gloo"), pytest.param("mpi", "MPI", marks=pytest.mark.slow)])
def test_sums_between_two_ranks(launcher: str, name: str, tmp_path: Path) -> None:
    """Each size is measured in each format, by the controller that the launcher has chosen."""
    found = bench(tmp_path, launcher, 2, "allreduce --max-size 64KB --repetitions 2 --device cpu")
    assert (found["workers"], found["controller"]) == (2, name)
    sizes = [(row["dtype"], row["bytes"]) for row in found["rows"]]
    assert sizes == [(dtype, 4**number) for dtype in ("fp32", "fp16", "bf16") for number in (5, 6, 7, 8)]
    for row in found["rows"]:  # of two ranks both bandwidths are the same
        assert row["bus_gb_per_second"] == row["algorithm_gb_per_second"] > 0


def scaling(folder: Path, line: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Return exit code, output and rows of a `bench scaling` into the folder `out`."""
    code, output = finished([HVD_TRAIN, "bench", "scaling", *line.split(), "--output-dir", "out"], folder)
    return code, output, json.loads((folder / "out/scaling.json").read_text())["rows"]


def test_scaling_on_one_and_two_workers(tmp_path: Path) -> None:
    """Each size is trained, the table comes in all its forms, and the repeated command trains nothing again."""
    line = "--np 1,2 digits --epochs 1 --device cpu"
    code, output, rows = scaling(tmp_path, line)
    assert code == 0, output
    one, two = rows
    assert (one["workers"], one["global_batch_size"], one["steps_per_epoch"], one["efficiency"]) == (1, 64, 23, 1.0)
    assert (two["workers"], two["global_batch_size"], two["steps_per_epoch"]) == (2, 128, 12)
    assert two["efficiency"] == pytest.approx(two["images_per_second"] / 2 / one["images_per_second"])
    assert all(row["val_loss"] and row["top1"] and row["epoch_seconds"] and row["failed"] is None for row in rows)
    with open(tmp_path / "out/scaling.csv") as file:
        assert [row["workers"] for row in csv.DictReader(file)] == ["1", "2"]
    assert (tmp_path / "out/scaling.txt").read_text().strip() in output
    assert (tmp_path / "out/throughput.png").read_bytes().startswith(b"\x89PNG")
    summaries = [json.loads((tmp_path / f"out/np-{n}/summary.json").read_text()) for n in (1, 2)]
    assert [summary["world_size"] for summary in summaries] == [1, 2]
    written = [(tmp_path / f"out/np-{n}/summary.json").stat().st_mtime_ns for n in (1, 2)]
    code, output, again = scaling(tmp_path, line)
    assert (code, again) == (0, rows), output
    assert [(tmp_path / f"out/np-{n}/summary.json").stat().st_mtime_ns for n in (1, 2)] == written
    code, output, again = scaling(tmp_path, f"{line} --lr 0.5")
    assert (code, again) == (2, rows)
    assert "run with other settings (learning_rate: 0.5, not 0.1)" in output


FAILS_ON_TWO = """
import os
from hvd_train.network.small import digits_convnet
def model(num_classes):
    if os.environ["HOROVOD_SIZE"] == "2":
        raise RuntimeError("no room for two")
    return digits_convnet(num_classes)
"""


@pytest.mark.slow
def test_a_size_that_fails_is_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed size the others still run, and the exit code says that one has failed."""
    (tmp_path / "partly.py").write_text(FAILS_ON_TWO)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    code, output, rows = scaling(tmp_path, "--np 1,2,3 --model partly:model --epochs 1 --device cpu")
    assert code == 1, output
    assert "no room for two" in rows[1]["failed"]
    assert [row["images_per_second"] is None for row in rows] == [False, True, False]


@pytest.mark.slow
def test_a_stopped_scaling_goes_on(tmp_path: Path) -> None:
    """Ctrl-C ends a scaling with its workers, which commit; the same command continues it."""
    line = "--np 2 digits --epochs 8 --commit-steps 1 --device cpu"
    command = [HVD_TRAIN, "bench", "scaling", *line.split(), "--output-dir", "out"]
    with started(command, tmp_path, tmp_path / "output.txt") as process:
        wait_for("a commit", lambda: list(tmp_path.glob("out/np-2/checkpoints/*.ckpt")), limit_s=120)
        workers = ranks_of(process, "train")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        wait_for("the workers to end", lambda: not any(worker.is_running() for worker in workers))
    assert "Traceback" not in (tmp_path / "output.txt").read_text()
    code, output, rows = scaling(tmp_path, line)
    assert code == 0, output
    assert rows[0]["top1"] > 0.2
    assert "going on at epoch" in (tmp_path / "out/np-2.log").read_text()


DOCUMENTED = [line for lines in commands("measuring.md").values() for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("line", DOCUMENTED)
def test_a_documented_command(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed as printed in docs/measuring.md, a command's record has every number that the page explains."""
    jpegs.digits(tmp_path / "data", classes=range(2), most=40)
    (tmp_path / "hostfiles").symlink_to(ROOT / "hostfiles")
    monkeypatch.setenv("PATH", f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")
    code, output = finished(["bash", "-c", line.replace("DATA", "data")], tmp_path)
    assert code == 0, output
    for path in tmp_path.glob("*.json"):
        assert missing(json.loads(path.read_text())) == set()
