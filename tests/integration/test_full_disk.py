"""Real trainings on a file system of 2 MB that is filled and emptied."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_train.run_files.ledger import audit
from tests.support.hosts import ROOT, arguments
from tests.support.launching import HVD_TRAIN, json_lines, started, wait_for
from tests.support.on_demand import pace

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root"),
]
TRAIN = [*arguments(epochs=1000), "--commit-steps", "5"]
TRAIN[TRAIN.index("run")] = "disk/run"


def fill(disk: Path) -> None:
    with (disk / "ballast").open("ab", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while file.write(bytes(4096)):
            pass


def end_of(folder: Path) -> int:
    """Assert that the files of a run lack nothing, and return the number of its steps."""
    report = audit(folder)
    assert report.faults == ()
    steps = list(range(1, report.steps + 1))
    assert [line["step"] for line in json_lines(folder / "metrics.jsonl") if line["kind"] == "step"] == steps
    shown = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == steps
    assert list(folder.rglob("*.partial")) == []
    return report.steps


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    """Neither a running nor a resumed training ends, and all files catch up when there is room."""
    output, disk, done = tmp_path / "output.txt", tmp_path / "disk", 0
    pace(tmp_path, 0.005)
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=True)
    try:
        for full_from_the_start in (False, True):
            if full_from_the_start:
                fill(disk)
            with started([HVD_TRAIN, "train", *TRAIN], tmp_path, output, {"PYTHONPATH": str(ROOT)}) as process:

                def says(what: str, times: int = 1, process: subprocess.Popen[bytes] = process) -> None:
                    wait_for(what, lambda: output.read_text().count(what) >= times or process.poll() is not None)
                    assert process.poll() is None, output.read_text()

                if not full_from_the_start:
                    says("epoch    1/1000")
                    fill(disk)
                says("; training continues, the newest good checkpoint is step-")
                says("val top-1", output.read_text().count("val top-1") + 2)
                (disk / "ballast").unlink()
                says("disk has space again: wrote the checkpoint of step ")
                process.send_signal(signal.SIGTERM)
                assert process.wait(200) == 128 + signal.SIGTERM, output.read_text()
            assert "Traceback" not in output.read_text()
            before, done = done, end_of(disk / "run")
            assert done > before
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
