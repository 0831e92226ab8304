"""Faults of GPUs and NCCL on the stand-in: none hangs a job, and none gives a wrong result."""

import json
import re
import sys

import pytest

from tests.fake_gpu.launch import OnGpu
from tests.support.launching import HVD_TRAIN, SCRIPTS, finished, launch_line, output_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ELASTIC = {"HOROVOD_ELASTIC": "1", "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": "2"}


def sums(gpu: OnGpu, *busy_ms: int, faults: str = "", **variables: str) -> list[list[object]]:
    """Return for each of two ranks whether each sum is right, or its error.

    The GPU is busy before the sums.
    """
    play = [sys.executable, "-m", "tests.fake_gpu.plays", *map(str, busy_ms)]
    variables = {**gpu.variables(faults=faults), **variables}
    _, output = finished(launch_line("gloo", 2, *play), gpu.folder, variables=variables)
    return [
        json.loads(line)
        for line in re.findall(r"(?:<stdout>:|^)(\[[tf\"].*\])$", output, re.MULTILINE)
    ]


@pytest.mark.parametrize("variables", [{}, ELASTIC], ids=["static", "elastic"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("horovod-launch@3:1", "BatchedScaledD2DMemcpyCudaImpl failed: "),
        ("async-error@2:1", "result 6 of the stand-in for NCCL"),
        (
            "hang@2",
            "a GPU operation has not ended after 2 seconds (HVD_TRAIN_NCCL_TIMEOUT_SECONDS)",
        ),
    ],
)
def test_a_broken_sum_is_an_error(
    gpu: OnGpu, fault: str, message: str, variables: dict[str, str]
) -> None:
    """On both ranks, before the sum ends as well as after, and no rank takes
    its own numbers for sums.
    """
    seen = sums(gpu, 0, 0, 0, faults=fault, HVD_TRAIN_NCCL_TIMEOUT_SECONDS="2", **variables)
    assert len(seen) == 2
    assert all(
        of_rank[0] is True and False not in of_rank and True not in of_rank[1:] for of_rank in seen
    ), seen
    assert message in str(seen)


@pytest.mark.parametrize("operation", [39, 40])
def test_an_error_of_nccl_ends_a_static_job(operation: int, gpu: OnGpu) -> None:
    """The line has NCCL's own words, whether the sum of metrics breaks or the sum of a bucket."""
    line = launch_line("gloo", 2, HVD_TRAIN, "train", "digits", "--device", "cuda")
    variables = gpu.variables(faults=f"async-error@{operation}:1")
    code, output = finished(line, gpu.folder, variables=variables)
    assert code not in (0, 134)
    assert (
        "(NCCL async error: result 6 of the stand-in" in output
        or "(ncclAllReduce failed: result 6 of" in output
    )
    assert "NCCL_DEBUG=INFO" in output


def test_a_death_in_init_does_not_end_an_elastic_job(gpu: OnGpu) -> None:
    """A worker that dies while communicators form is replaced."""
    training = "-np 2 -- digits --device cuda --epochs 1 --output-dir run"
    line = [f"{SCRIPTS}/train_elastic.sh", "--discover", "echo localhost:2", *training.split()]
    marks = gpu.folder / "marks"
    marks.mkdir()
    output_of(line, gpu.folder, variables=gpu.variables(faults="die-in-init@1:1", once=marks))
