"""Elastic jobs with many more workers than this machine has cores: they form, lose a worker, take one, and end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train.run_files.ledger import audit
from tests.support.launching import ranks_of, started, wait_for

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [16, pytest.param(32, marks=pytest.mark.long)])
def test_many_workers_on_one_machine(workers: int, tmp_path: Path) -> None:
    """A busy machine is no fault: none is lost but the one that is killed, whose place another one takes."""
    script = ROOT / "horovodrun_scripts" / "train_elastic.sh"
    command = [str(script), "--discover", f"echo localhost:{workers}", "-np", str(workers), "--"]
    line = f"digits --epochs 4000 --global-batch-size {2 * workers} --batch-size 2 --ledger --log-steps 1"
    output, metrics = tmp_path / "output.txt", tmp_path / "run" / "metrics.jsonl"

    def worlds() -> list[int]:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        events = [json.loads(line) for line in lines if '"world"' in line]
        return [event["world_size"] for event in events if event.get("name") == "world"]

    with started([*command, *line.split(), "--output-dir", "run"], tmp_path, output) as job:
        wait_for("all workers", lambda: metrics.exists() and metrics.read_text().count('"step"') > 3, limit_s=240)
        victim = next(one for one in ranks_of(job, "train") if one.cmdline()[1].endswith("hvd-train"))
        victim.kill()
        wait_for("a world with a newcomer", lambda: len(worlds()) > 1 and worlds()[-1] == workers, limit_s=240)
        job.terminate()
        assert job.wait(120) == 128 + 15, output.read_text()
    report = audit(tmp_path / "run")
    assert report.faults == ()
    assert output.read_text().count("0 steps lost") == output.read_text().count("steps lost")
