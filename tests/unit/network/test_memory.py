"""Memory that does not suffice is one line with what to type."""

from __future__ import annotations

import re
import shlex

import pytest
import torch

from hvd_train.errors import OutOfMemory
from hvd_train.network.memory import enough_for, smaller_passes
from hvd_train.progress.order import choose_cut
from hvd_train.settings.batch import BatchConfig

CPU = torch.device("cpu")


def raising(error: Exception) -> None:
    """Raise `error` where memory has to suffice."""
    with enough_for("with 64 samples in a pass", CPU, "type --batch-size 32"):
        raise error


def test_a_tensor_that_does_not_fit_is_one_line() -> None:
    """What was done, what there was, and what to type; torch raises a RuntimeError for the memory of a host."""
    with pytest.raises(OutOfMemory) as caught, enough_for("with 64 samples in a pass", CPU, "type --batch-size 32"):
        torch.empty(10**15)
    line = r"out of memory with 64 samples in a pass: this process held \d+\.\d\d GB at its peak, and the host has "
    assert re.fullmatch(line + r"\d+\.\d\d GB; type --batch-size 32", str(caught.value))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_libraries_say_it_in_several_ways(error: RuntimeError) -> None:
    """Torch's allocator, CUDA, cuDNN and cuBLAS."""
    with pytest.raises(OutOfMemory):
        raising(error)


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("out of memory")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    """A bug keeps its traceback."""
    with pytest.raises(type(error), match=str(error)):
        raising(error)


@pytest.mark.parametrize(
    "batch",
    [
        BatchConfig(batch_size=64),
        BatchConfig(batch_size=64, accumulation_steps=3),
        BatchConfig(batch_size=25),
        BatchConfig(global_batch_size=256, batch_size=64),
        BatchConfig(global_batch_size=256, batch_size=32, accumulation_steps=2),
        BatchConfig(global_batch_size=250),
    ],
)
def test_what_is_to_be_typed_gives_the_same_steps_in_passes_of_half_the_size(batch: BatchConfig) -> None:
    """The global batch, and with it the weights, stay as they are."""
    before = choose_cut(batch, 4, 10_000)
    words = shlex.split(smaller_passes(batch, before).partition(":")[0].removeprefix("type "))
    flags = {
        flag.removeprefix("--").replace("-", "_"): int(value)
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    after = choose_cut(BatchConfig(**flags), 4, 10_000)
    assert after.global_batch == before.global_batch
    assert after.micro_batch == before.micro_batch // 2


def test_a_pass_of_one_sample_cannot_be_halved() -> None:
    """Something else is to be typed then."""
    batch = BatchConfig(batch_size=1)
    assert "--precision bf16" in smaller_passes(batch, choose_cut(batch, 2, 100))
