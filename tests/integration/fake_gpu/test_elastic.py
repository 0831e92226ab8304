"""Elastic jobs over the stand-in's NCCL: dead and silent workers cost no step."""

import signal
from pathlib import Path

import psutil
import pytest

from hvd_train.run_files.ledger import audit
from tests.fake_gpu.launch import OnGpu
from tests.support.launching import ranks_of, started, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "horovodrun_scripts" / "train_elastic.sh"


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_costs_no_step(gpu: OnGpu, fault: signal.Signals) -> None:
    """Survivors continue in the same step, a new worker joins, and every sample counts once."""
    run = gpu.folder / "run"
    output = gpu.folder / "output.txt"
    ledger = run / "ledger.jsonl"
    line = [str(SCRIPT), "--discover", "echo localhost:2", "-np", "2", "--", "digits", "--device", "cuda"]
    line += ["--epochs", "4000", "--ledger", "--output-dir", "run"]

    def steps() -> int:
        return ledger.read_bytes().count(b"\n") if ledger.exists() else 0

    def changes() -> int:
        return (run / "metrics.jsonl").read_text().count('"name": "world"')

    def workers() -> list[psutil.Process]:
        return [process for process in ranks_of(script, "train") if process.cmdline()[1].endswith("hvd-train")]

    with started(line, gpu.folder, output, gpu.variables(nccl_piece_us=2000)) as script:
        wait_for("the first steps", lambda: steps() > 5, limit_s=120)
        workers()[0].send_signal(fault)
        wait_for("the survivor and then a newcomer", lambda: changes() > 1, limit_s=120)
        before = steps()
        wait_for("steps together", lambda: steps() > before + 5, limit_s=120)
        script.send_signal(signal.SIGTERM)
        assert script.wait(120) == 128 + signal.SIGTERM, output.read_text()
    report = audit(run)
    assert (report.faults, report.world_sizes) == ((), (1, 2)), output.read_text()
    text = output.read_text()
    assert text.count(" 0 steps lost") == text.count("steps lost") >= 2, text
