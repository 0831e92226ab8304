"""`make gpu-check` on the stand-in: all stages in their smallest form, a wrong sum, and a check that is killed."""

from __future__ import annotations

import json
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_train.launch import processes
from tests.fake_gpu.launch import OnGpu
from tests.support.launching import finished, started, wait_for

pytestmark = pytest.mark.integration

CHECK = [sys.executable, "-m", "benchmarks.gpu_check", "--short", "--folder", "check"]
STAGES = ["doctor", "sums", "equality", "faults", "speed", "input", "memory"]


def record(folder: Path) -> dict[str, Any]:
    """Return the record of a check in this folder."""
    values: dict[str, Any] = json.loads((folder / "check" / "record.json").read_text())
    return values


def verdicts(stages: list[dict[str, Any]]) -> dict[str, str]:
    """Return the verdict on each check, by its name."""
    return {finding["name"]: finding["verdict"] for stage in stages for finding in stage["findings"]}


def test_without_a_gpu_there_is_one_line(tmp_path: Path) -> None:
    """Where torch sees no GPU, the check says so and leaves no record."""
    code, output = finished(CHECK, tmp_path, variables={"PYTHONPATH": str(Path(__file__).parents[3])})
    assert (code, output.count("\n")) == (2, 1), output
    assert output.startswith("gpu-check: torch sees no GPU here")
    assert not (tmp_path / "check").exists()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_stage_comes_to_a_verdict(gpu: OnGpu) -> None:
    """The whole check runs: sums, weights, a lost rank 0, both bare loops, files and a state are as they must be."""
    variables = gpu.variables(devices=2, memory=200_000_000, caching=True)
    code, output = finished(CHECK, gpu.folder, limit_s=800, variables=variables)
    found = record(gpu.folder)
    assert [stage["stage"] for stage in found["stages"]] == STAGES
    assert {stage["verdict"] for stage in found["stages"]} <= {"passed", "failed"}, output
    assert code == (1 if found["verdict"] == "failed" else 0)
    assert "stand-in" in found["machine"]
    must = ("2 ranks", "CPU", "CUDA, alone", "CUDA, 2 ranks", "deterministic", "kill -9 of rank 0", "audit", "state")
    must += ("bench input, 1 processes", "bench input, decoded by the GPU")
    must += tuple(name for name in verdicts(found["stages"]) if name.startswith("small"))
    assert {name: verdicts(found["stages"])[name] for name in must} == dict.fromkeys(must, "passed"), output


@pytest.mark.slow
def test_a_wrong_sum_ends_the_check(gpu: OnGpu) -> None:
    """Where a sum over the ranks is wrong, or Horovod's kernels do not run, no other stage is tried any more."""
    variables = gpu.variables(devices=2, caching=True, faults="horovod-launch@1:1")
    code, output = finished([*CHECK, "--stages", "sums,equality,memory"], gpu.folder, variables=variables)
    assert code == 1, output
    stages = record(gpu.folder)["stages"]
    assert [stage["verdict"] for stage in stages] == ["failed", "not applicable", "not applicable"], output
    assert not (gpu.folder / "check" / "cpu").exists(), "it has trained all the same"


@pytest.mark.slow
def test_a_killed_check_leaves_what_it_has(gpu: OnGpu) -> None:
    """After kill -9 the record has what was seen so far, and says that the stage under way has not ended."""
    mark = {"GPU_CHECK_TEST": uuid.uuid4().hex}
    variables = {**gpu.variables(devices=2, caching=True), **mark}
    output = gpu.folder / "output.txt"
    try:
        with started([*CHECK, "--stages", "doctor"], gpu.folder, output, variables) as check:
            wait_for("a finding", lambda: "doctor: libcuda" in output.read_text(), limit_s=120)
            check.kill()
            check.wait()
    finally:
        for process in processes.started_with(mark):
            with suppress(psutil.Error):
                process.kill()
    found = record(gpu.folder)
    assert (found["verdict"], found["stages"][0]["verdict"]) == ("not ended", "not ended")
    assert verdicts(found["stages"])["libcuda"] == "passed"
