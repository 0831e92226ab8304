"""Inputs on the stand-in: copied beside the kernels, a micro-batch ahead, with the bits of a CPU and no race."""

from __future__ import annotations

import pytest

from tests.fake_gpu.launch import OnGpu

pytestmark = pytest.mark.integration


@pytest.mark.slow
@pytest.mark.parametrize(("source", "kind"), [("items", "float32"), ("items", "uint8"), ("arrays", "uint8")])
def test_a_gpu_holds_two_micro_batches_however_many_a_step_has(gpu: OnGpu, source: str, kind: str) -> None:
    """The one in use and the next; the weights are those of a CPU to the bit, however late copies and kernels are."""
    play = "accumulation", source, kind, "2", "8"
    (equal, few), (also_equal, many) = gpu.played(*play, of="input_plays", delay_us=1000, seed=1)
    assert equal
    assert also_equal
    assert many - few < 0.5, "in micro-batches"


def test_copies_do_not_wait_for_kernels(gpu: OnGpu) -> None:
    """A copy arrives while the default stream is busy; kernels that read it wait for it."""
    assert gpu.played("copies", of="input_plays") == [True, True]
