"""Faults of GPUs and of NCCL, on the stand-in: no rank hangs or takes half a sum for a sum, and the user is told."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpu.launch import OnGpu
from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "horovodrun_scripts" / "train_elastic.sh"
ELASTIC = {"HOROVOD_ELASTIC": "1", "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": "2"}


def played(gpu: OnGpu, name: str, *milliseconds: int, variables: dict[str, str]) -> list[Any]:
    """Return what each of two ranks has seen in one of the plays with a GPU that is busy for so long."""
    play = [sys.executable, "-m", "tests.fake_gpu.horovod_plays", name, *map(str, milliseconds)]
    tagged = {**variables, "HVD_TRAIN_OUTPUT_PREFIX": "all"}
    code, output = finished(launch_line("gloo", 2, *play), gpu.folder, variables=tagged)
    assert code == 0, output
    lines: dict[str, str] = dict(re.findall(r"^\[(\d)\]<stdout>:([\[\d].*)$", output, re.MULTILINE))
    return [json.loads(lines[rank]) for rank in sorted(lines)]


def sums(gpu: OnGpu, *milliseconds: int, variables: dict[str, str]) -> list[list[bool | str]]:
    """Return what each of two ranks has seen of sums before which its GPU is busy for so long."""
    return played(gpu, "sums", *milliseconds, variables=variables)


def test_who_waits_for_a_gpu_leaves_the_core_to_others(gpu: OnGpu) -> None:
    """A rank whose sum waits for its GPU takes no core for that: loader processes need it."""
    shares = played(gpu, "processor_time", 3000, variables=gpu.variables())
    assert max(shares) < 0.3, shares


def test_a_busy_gpu_is_no_silent_peer(gpu: OnGpu) -> None:
    """Work that all ranks have before a sum, or one of them, may take longer than the limit for silent ranks."""
    variables = gpu.variables(faults="stall@3=3000:1")
    assert sums(gpu, 0, 3000, 0, 0, variables={**variables, **ELASTIC}) == [[True] * 4] * 2


@pytest.mark.parametrize("job", [{}, ELASTIC], ids=["static", "elastic"])
def test_a_gpu_that_hangs_is_told(gpu: OnGpu, job: dict[str, str]) -> None:
    """A sum that could begin and does not end within its own limit is an error, and not left behind on other ranks."""
    variables = {**gpu.variables(faults="stall@2=4000:1"), **job, "HVD_TRAIN_GPU_OPERATION_TIMEOUT_SECONDS": "1"}
    of_rank_0, of_rank_1 = sums(gpu, 0, 0, variables=variables)
    assert of_rank_0[0] is of_rank_1[0] is True
    assert "has not ended within 1 s (HVD_TRAIN_GPU_OPERATION_TIMEOUT_SECONDS)" in str(of_rank_0[1])
    assert isinstance(of_rank_1[1], str)


def test_a_kernel_that_is_not_launched_is_told(gpu: OnGpu) -> None:
    """Where Horovod's kernels cannot run, as with a build for other GPUs, no rank takes its own numbers for sums."""
    for_each_rank = sums(gpu, 0, 0, 0, 0, variables=gpu.variables(faults="horovod-launch@3"))
    for seen in for_each_rank:
        assert False not in seen, for_each_rank
        assert "HOROVOD_BUILD_CUDA_CC_LIST" in str(seen), for_each_rank


def test_an_error_of_nccl_ends_a_static_job(gpu: OnGpu) -> None:
    """A sum that NCCL has given up is an error on all ranks, with NCCL's reason where it is known."""
    of_rank_0, of_rank_1 = sums(gpu, 0, 0, variables=gpu.variables(faults="async-error@2:1"))
    assert of_rank_0[0] is of_rank_1[0] is True
    assert isinstance(of_rank_0[1], str)
    assert "an operation of NCCL failed: remote process exited" in str(of_rank_1[1])


def test_tensors_of_a_call_that_fails_come_back_unused(gpu: OnGpu) -> None:
    """Where NCCL refuses a sum, Horovod's copies before it may still wait for the GPU: their tensors are in use."""
    variables = gpu.variables(faults="call-error@2:1")
    of_rank_0, of_rank_1 = sums(gpu, 0, 1000, 0, variables=variables)
    assert not gpu.told(), "memory was freed in use"
    assert isinstance(of_rank_0[1], str)
    assert "ncclAllReduce failed: unhandled system error" in str(of_rank_1[1])


def test_a_group_for_which_there_is_no_memory_is_told(gpu: OnGpu) -> None:
    """Where Horovod cannot have the memory in which a group travels, ranks hear so; they waited for one another."""
    for (seen,) in sums(gpu, 0, variables=gpu.variables(memory=64_000_000, caching=True)):
        assert "CUDA out of memory" in str(seen)


def test_a_set_up_that_takes_its_time_is_no_fault(gpu: OnGpu) -> None:
    """A rank that is late in NCCL's set-up, and operations that come late to their streams, do not break a sum."""
    variables = gpu.variables(faults="late-in-init@1=3000:1 slow-call@2=300 slow-call@3=300:0")
    assert sums(gpu, 0, 0, 0, variables={**variables, **ELASTIC}) == [[True] * 3] * 2


def test_a_set_up_that_fails_is_one_line(gpu: OnGpu) -> None:
    """The user reads on which rank NCCL cannot be set up, why, and what shows more, whichever rank speaks for all."""
    line = launch_line("gloo", 2, HVD_TRAIN, "train", "digits", "--device", "cuda")
    code, output = finished(line, gpu.folder, variables=gpu.variables(faults="error-in-init@1:1"))
    assert code == 3, output
    told = [line for line in output.splitlines() if "hvd-train: " in line]
    assert len(told) == 1, output
    assert "rank 1 cannot set up NCCL: ncclCommInitRank failed: unhandled system error" in told[0]
    assert "export NCCL_DEBUG=INFO to see more; step 0 is committed" in told[0]
    assert "Traceback" not in output, output


def elastic_job(gpu: OnGpu, fault: str) -> str:
    """Return what an elastic job of two ranks prints, in which a fault happens once."""
    line = [str(SCRIPT), "--discover", "echo localhost:2", "-np", "2", "--", "digits", "--device", "cuda"]
    line += ["--epochs", "2", "--output-dir", "run"]
    marks = gpu.folder / "marks"
    marks.mkdir()
    code, output = finished(line, gpu.folder, variables=gpu.variables(faults=fault, once=marks))
    assert code == 0, output
    return output


def test_an_error_of_nccl_costs_an_elastic_job_no_worker(gpu: OnGpu) -> None:
    """Where a sum is given up by NCCL, all ranks leave their world at once, and meet again."""
    output = elastic_job(gpu, "async-error@40:1")
    assert "the same ranks met again" in output, output
    assert "0 steps lost" in output, output


def test_a_death_in_set_up_costs_an_elastic_job_one_worker(gpu: OnGpu) -> None:
    """Where a rank dies while communicators form, the other one is not left waiting: it goes on by itself."""
    output = elastic_job(gpu, "die-in-init@1:1")
    assert "world 2 -> 1 at step 0" in output, output
    assert "is taken out" not in output, output
