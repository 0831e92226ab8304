"""Batch norm over ranks on the stand-in: streams wait for its sums, not the host, and they break as others do."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train.run_files.ledger import audit
from tests.fake_gpu.launch import OnGpu
from tests.integration.fake_gpu.test_faults import played
from tests.integration.fake_gpu.test_training import command, on_cpu, on_gpu, weights
from tests.support.launching import finished
from tests.support.runs import equal

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "horovodrun_scripts" / "train_elastic.sh"
FLAGS = ("--model", "tests.support.runs:batch_norm", "--sync-batch-norm", "--compression", "none")
ONE_PASS = (*FLAGS, "--batch-size", "32")  # in a step of two ranks
# One of two ranks, or of three, lacks a slot in the last pass.
FIVE_SLOTS = (*FLAGS, "--batch-size", "16", "--global-batch-size", "80")
# A step of one pass has three operations of NCCL: in its forward pass, in its backward pass, and for its gradients.
IN_FORWARD_PASS, IN_BACKWARD_PASS = 31, 32  # of the eleventh step


def test_the_host_does_not_wait_for_a_sum_that_a_stream_waits_for(gpu: OnGpu) -> None:
    """It is back while the GPU has not begun with the sum; what the stream computes with it later is right."""
    seen = played(gpu, "sums_for_stream", 1000, variables=gpu.variables(delay_us=3000))
    second = [2.0 * (2 * number + 1) for number in range(5)]
    assert seen == [[True, second, [2 * number for number in second]]] * 2
    assert gpu.told() == []


def test_a_sum_that_breaks_after_the_host_went_on_is_told_by_the_next_one(gpu: OnGpu) -> None:
    """With NCCL's reason where it is known, as if the host had waited."""
    (of_rank_0,), (of_rank_1,) = played(gpu, "sums_for_stream", 0, variables=gpu.variables(faults="async-error@2:1"))
    assert isinstance(of_rank_0, str)
    assert "an operation of NCCL failed: remote process exited" in of_rank_1


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_are_those_of_cpus(gpu: OnGpu, ranks: int) -> None:
    """To the bit, however late streams are, also where a rank lacks a slot; and no race is told."""
    found = on_gpu(gpu, ranks, *FIVE_SLOTS, seed=ranks, delay_us=1000)
    assert gpu.told() == []
    assert equal(found, on_cpu(gpu.folder, ranks, *FIVE_SLOTS))


@pytest.mark.parametrize("operation", [IN_FORWARD_PASS, IN_BACKWARD_PASS])
def test_an_error_of_nccl_ends_a_static_job(gpu: OnGpu, operation: int) -> None:
    """Before the weights of that step change, with NCCL's reason."""
    variables = gpu.variables(faults=f"async-error@{operation}:1")
    code, output = finished(command("cuda", 2, "gpu", *ONE_PASS), gpu.folder, variables=variables)
    assert code == 3, output
    assert "an operation of NCCL failed: remote process exited" in output
    assert "step 10 is committed" in output
    assert "Traceback" not in output, output


@pytest.mark.parametrize(
    "fault", [f"async-error@{IN_BACKWARD_PASS}:1", f"die-in-operation@{IN_FORWARD_PASS}:1"], ids=["error", "death"]
)
def test_an_elastic_job_loses_no_step(gpu: OnGpu, fault: str) -> None:
    """In the middle of a pass NCCL fails, or a rank dies: the others repeat that step, and every sample counts once."""
    line = [str(SCRIPT), "--discover", "echo localhost:2", "-np", "2", "--", "digits", "--device", "cuda", *ONE_PASS]
    line += ["--epochs", "1", "--ledger", "--output-dir", "gpu"]
    marks = gpu.folder / "marks"
    marks.mkdir()
    variables = gpu.variables(faults=fault, once=marks)
    code, output = finished(line, gpu.folder, variables=variables)
    assert code == 0, output
    assert list(marks.iterdir()), "the fault has not happened"
    assert output.count(" 0 steps lost") == output.count("steps lost") > 0, output
    assert audit(gpu.folder / "gpu").faults == ()
    if "the same ranks met again" in output:
        assert equal(weights(gpu.folder / "gpu"), on_cpu(gpu.folder, 2, *ONE_PASS))
