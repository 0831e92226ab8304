"""Real trainings into a file system of 2 MB that is filled and emptied while they run."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_train.run_files.ledger import audit
from tests.support.elastic_hosts import ROOT, SCRIPTS, arguments
from tests.support.full_disk import empty, fill, small_disk
from tests.support.launching import HVD_TRAIN, ranks_of, started, wait_for
from tests.support.on_demand import pace

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root"),
]
TRAIN = [*arguments(epochs=1000, model="tests.support.on_demand:obedient"), "--commit-steps", "5"]
TRAIN[TRAIN.index("run")] = "disk/run"


def end_of(folder: Path) -> int:
    """Assert that the files of a run lack nothing, and return the number of its steps."""
    report = audit(folder)
    assert report.faults == ()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = list(range(1, report.steps + 1))
    assert [line["step"] for line in lines if line["kind"] == "step"] == steps
    shown = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == steps
    assert list(folder.rglob("*.partial")) == []
    return report.steps


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    """Neither a run that trains nor one that goes on: it trains live, and all files catch up when there is room."""
    output, run = tmp_path / "output.txt", tmp_path / "disk/run"
    command = ["env", f"PYTHONPATH={ROOT}", HVD_TRAIN, "train", *TRAIN]
    pace(tmp_path, 0.005)
    with small_disk(tmp_path / "disk") as disk:
        done = 0
        for full_from_the_start in (False, True):
            if full_from_the_start:
                fill(disk)
            with started(command, tmp_path, output) as process:

                def says(what: str, process: object = process) -> None:
                    wait_for(what, lambda: what in output.read_text() or process.poll() is not None)  # type: ignore[attr-defined]
                    assert process.poll() is None, output.read_text()  # type: ignore[attr-defined]

                if not full_from_the_start:
                    says("epoch    1/1000")
                    fill(disk)
                says("; training goes on, the newest good checkpoint is step-")
                seen = output.read_text().count("val top-1")
                wait_for("two epochs", lambda seen=seen: output.read_text().count("val top-1") > seen + 1)
                assert process.poll() is None
                empty(disk)
                says("commits fit again: step ")
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 128 + signal.SIGTERM, output.read_text()
            steps = end_of(run)
            assert steps > done
            done = steps
        assert "Traceback" not in output.read_text()


def test_the_rank_that_takes_over_a_full_disk_trains_live(tmp_path: Path) -> None:
    """Rank 0 of an elastic job dies while there is no room; its successor commits when there is."""
    output, run = tmp_path / "output.txt", tmp_path / "disk/run"
    script = [str(SCRIPTS / "train_elastic.sh"), "-np", "2", "--", *TRAIN]
    command = ["sh", "-c", f"PYTHONPATH={ROOT} exec {shlex.join(script)}"]
    pace(tmp_path, 0.005)
    with small_disk(tmp_path / "disk") as disk, started(command, tmp_path, output) as process:

        def says(what: str, times: int = 1) -> None:
            wait_for(what, lambda: output.read_text().count(what) >= times or process.poll() is not None)
            assert process.poll() is None, output.read_text()

        says("epoch    1/1000")
        fill(disk)
        says("; training goes on, the newest good checkpoint is step-")
        said = output.read_text().count("val top-1")
        workers = [process for process in ranks_of(process, "train") if "HVD_TRAIN_SLOT" in process.environ()]
        next(worker for worker in workers if worker.environ()["HVD_TRAIN_SLOT"] == "0").kill()
        says("world 2 -> 1")
        says("val top-1", said + 2)
        empty(disk)
        says("commits fit again: step ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM, output.read_text()
        assert "0 steps lost" in output.read_text()
        # The lines that waited for room in the memory of the rank that died are lost; the ledger's are in the state.
        assert audit(run).faults == ()
