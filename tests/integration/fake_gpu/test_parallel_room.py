"""Runs tests/parallel on the stand-in, over NCCL."""

from __future__ import annotations

import pytest

from tests.fake_gpu.launch import OnGpu
from tests.support import device, parallel_room


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_parallel_room_passes_over_nccl(gpu: OnGpu) -> None:
    """The contract and the equivalence of rank numbers hold on GPUs, too: these are the same tests."""
    parallel_room.passes("gloo", 2, gpu.folder, {**gpu.variables(), device.VARIABLE: "cuda"})
