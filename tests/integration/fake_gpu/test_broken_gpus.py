"""GPUs that break, hang or are busy, in whole jobs: these end with an error, or go on without them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvd_train.run_files.ledger import audit
from tests.fake_gpu.launch import OnGpu
from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "horovodrun_scripts" / "train_elastic.sh"
FOR_EVER = 10**8  # ms
# Before a rank's GPU counts as hung, in seconds.
LIMITS = {"HVD_TRAIN_GPU_OPERATION_TIMEOUT_SECONDS": "6", "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": "6"}


def test_a_broken_gpu_ends_a_static_job(gpu: OnGpu) -> None:
    """All ranks end soon after one whose GPU fails every call, and the launcher fails."""
    line = launch_line("gloo", 2, HVD_TRAIN, "train", "digits", "--device", "cuda", "--epochs", "100")
    variables = gpu.variables(faults="broken@1500:1", caching=True)
    code, output = finished(line, gpu.folder, limit_s=100, variables=variables)
    assert code != 0
    assert "an illegal memory access was encountered" in output


def elastic_job(gpu: OnGpu, faults: str, **settings: object) -> str:
    """Return what an elastic job of two ranks prints that ends well in spite of faults, each of which happens once."""
    marks = gpu.folder / "marks"
    marks.mkdir()
    line = [str(SCRIPT), "--discover", "echo localhost:2", "-np", "2", "--", "digits", "--device", "cuda"]
    line += ["--epochs", "2", "--ledger", "--output-dir", "run"]
    variables = {**gpu.variables(faults=faults, once=marks, **settings), **LIMITS}
    code, output = finished(line, gpu.folder, limit_s=150, variables=variables)
    assert code == 0, output
    assert len(list(marks.iterdir())) == len(faults.split()), "not all faults have happened"
    assert (audit(gpu.folder / "run").faults, audit(gpu.folder / "run").epochs) == ((), 2), output
    assert output.count(" 0 steps lost") == output.count("steps lost"), output
    return output


def test_a_hung_gpu_is_noticed_and_a_busy_one_is_waited_for(gpu: OnGpu) -> None:
    """The job goes on without the worker whose GPU hangs, and loses no step; a pause of a GPU breaks nothing."""
    output = elastic_job(gpu, f"busy@1500=2000:0 stall@30={FOR_EVER}:1")
    assert re.findall(r"world (\d -> \d) at step (\d+): .*left", output) == [("2 -> 1", "14")], output


def test_a_broken_gpu_costs_an_elastic_job_one_worker(gpu: OnGpu) -> None:
    """A worker whose GPU fails every call ends with CUDA's words, and the other one goes on from the same step."""
    output = elastic_job(gpu, "broken@3000:1", caching=True)
    assert "an illegal memory access was encountered" in output
    # A worker may have come in its place before the other one, on a busy machine, has met anew.
    assert re.findall(r"world 2 -> [12] at step \d+: [^;]* left [^;]*\(a rank was lost\)", output), output
    assert output.count("\nworld ") == 1, output
