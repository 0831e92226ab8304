"""Faults that the stand-in shows and that are not fixed yet. A fix removes the mark."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.fake_gpu.launch import OnGpu
from tests.support.launching import finished, launch_line, output_of, started, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "horovodrun_scripts" / "train_elastic.sh"
HANG_S = 15  # when a job that is known to hang has hung long enough


def sums(gpu: OnGpu, busy_ms: int, limit_s: int) -> list[list[object]]:
    """Return which of two sums are right on each of two ranks; their GPU is busy before the second."""
    elastic = {"HOROVOD_ELASTIC": "1", "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": str(limit_s)}
    play = [sys.executable, "-m", "tests.fake_gpu.horovod_plays", "sums", "0", str(busy_ms)]
    output = output_of(launch_line("gloo", 2, *play), gpu.folder, variables={**gpu.variables(), **elastic})
    return [json.loads(line) for line in re.findall(r"<stdout>:(\[.*\])$", output, re.MULTILINE)]


def test_sums_are_right(gpu: OnGpu) -> None:
    """They are right without a fault, also if the GPU is busy for less than the limit."""
    assert sums(gpu, busy_ms=500, limit_s=60) == [[True, True]] * 2


@pytest.mark.xfail(reason="the limit for silent peers begins while the GPU has other work before the sum")
def test_a_busy_gpu_is_no_silent_peer(gpu: OnGpu) -> None:
    """Work queued before a sum may take longer than the limit of an operation between ranks."""
    assert sums(gpu, busy_ms=4000, limit_s=2) == [[True, True]] * 2


@pytest.mark.xfail(reason="Horovod does not ask whether its kernels were launched")
def test_a_kernel_that_is_not_launched_is_an_error(gpu: OnGpu) -> None:
    """If Horovod's kernels cannot run, no rank takes its own numbers for sums."""
    variables = gpu.variables(faults="horovod-launch@3")
    play = [sys.executable, "-m", "tests.fake_gpu.horovod_plays", "sums", "0", "0", "0", "0"]
    _, output = finished(launch_line("gloo", 2, *play), gpu.folder, variables=variables)
    assert "false" not in output, output


@pytest.mark.xfail(reason="a static job does not look for NCCL's errors while it waits")
def test_an_error_of_nccl_ends_a_static_job(gpu: OnGpu) -> None:
    """It ends with an error instead of waiting forever."""
    line = launch_line("gloo", 2, str(Path(sys.executable).parent / "hvd-train"), "train", "digits", "--device", "cuda")
    code, _ = finished(line, gpu.folder, limit_s=HANG_S, variables=gpu.variables(faults="async-error@40:1"))
    assert code != 0


@pytest.mark.xfail(reason="ncclCommInitRank waits for ever for a peer that has died in it")
def test_a_death_in_init_does_not_end_an_elastic_job(gpu: OnGpu) -> None:
    """A worker that dies while communicators form is replaced."""
    line = [str(SCRIPT), "--discover", "echo localhost:2", "-np", "2", "--", "digits", "--device", "cuda"]
    line += ["--epochs", "1", "--output-dir", "run"]
    marks = gpu.folder / "marks"
    marks.mkdir()
    variables = gpu.variables(faults="die-in-init@1:1", once=marks)
    with started(line, gpu.folder, gpu.folder / "output.txt", variables) as script:
        wait_for("the end", lambda: script.poll() is not None, limit_s=HANG_S)
        assert script.returncode == 0
