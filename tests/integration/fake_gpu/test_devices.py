"""What a rank says of GPUs that it cannot use, on the stand-in."""

from __future__ import annotations

import pytest

from tests.fake_gpu.launch import OnGpu
from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def trained(gpu: OnGpu, ranks: int, *flags: str, variables: dict[str, str]) -> tuple[int, str]:
    """Return the exit code and the output of a short training on the stand-in."""
    line = [HVD_TRAIN, "train", "digits", "--epochs", "1", "--output-dir", "run", *flags]
    return finished(launch_line("gloo" if ranks > 1 else "none", ranks, *line), gpu.folder, variables=variables)


def test_a_driver_that_is_too_old_ends_the_job_with_one_line(gpu: OnGpu) -> None:
    """Instead of a training on the CPUs of a machine with GPUs, unless that is asked for; the doctor says it, too."""
    variables = gpu.variables(driver=12040)
    code, output = trained(gpu, 2, variables=variables)
    assert code == 2, output
    assert output.count("is for CUDA 12.4, and torch is built for CUDA") == 1, output
    assert "--device cpu" in output
    code, output = trained(gpu, 1, "--device", "cpu", variables=variables)
    assert code == 0, output
    code, output = finished([HVD_TRAIN, "doctor", "--quick", "--json"], gpu.folder, variables=variables)
    assert code == 1, output
    assert "is for CUDA 12.4, and torch is built for CUDA" in output


def test_a_gpu_for_which_horovod_has_no_code_ends_the_job_with_one_line(gpu: OnGpu) -> None:
    """Its kernels could not be launched; a process that trains alone needs none of them. The doctor says it, too."""
    variables = gpu.variables(capability=70)
    code, output = trained(gpu, 2, variables=variables)
    assert code == 2, output
    assert output.count("Horovod is not compiled for Fake GPU") == 1, output
    assert "HOROVOD_BUILD_CUDA_CC_LIST=70," in output
    code, output = finished([HVD_TRAIN, "doctor", "--quick", "--json"], gpu.folder, variables=variables)
    assert code == 1, output
    assert "not for 7.0" in output


def test_memory_that_does_not_suffice_is_one_line(gpu: OnGpu) -> None:
    """It has the peak of what torch held, and the size of the GPU."""
    variables = gpu.variables(memory=64_000_000, caching=True)
    code, output = trained(gpu, 1, "--device", "cuda", "--batch-size", "1400", variables=variables)
    assert code == 8, output
    assert output.count("out of memory with 1400 samples in a pass: torch held 0.0") == 1, output
    assert "and Fake GPU 0 has 0.06 GB; type --batch-size 700 --accumulation-steps 2" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(("visible", "code"), [("$HOROVOD_LOCAL_RANK", 0), ("2", 2)])
def test_each_rank_may_see_its_own_gpu_alone(gpu: OnGpu, visible: str, code: int) -> None:
    """As with srun --gpus-per-task=1; two ranks that were given the same one end with one line."""
    train = f"CUDA_VISIBLE_DEVICES={visible} exec {HVD_TRAIN} train digits --device cuda --epochs 1"
    ended, output = finished(launch_line("gloo", 2, "sh", "-c", train), gpu.folder, variables=gpu.variables())
    assert ended == code, output
    assert output.count("ranks 0 and 1 have the same GPU") == (code == 2), output
