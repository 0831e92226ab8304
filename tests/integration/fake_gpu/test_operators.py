"""Torch on the stand-in: its operators compute what the CPU's do, and what it does not wait for is told."""

from __future__ import annotations

import pytest

from tests.fake_gpu.launch import OnGpu

pytestmark = pytest.mark.integration


def test_operators_are_those_of_the_cpu(gpu: OnGpu) -> None:
    """Training, views, results of another size, groups, number formats and layouts are equal to the bit."""
    assert gpu.played("operators", of="torch_plays", delay_us=1000) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"),
    [("waits", None), ("forgets", "a race: aten.sum"), ("told", None), ("untold", "freed too early")],
)
def test_a_stream_that_is_not_told_is_seen(gpu: OnGpu, kind: str, told: str | None) -> None:
    """A side stream has to wait for what it reads, and memory has to know of it before its tensor ends."""
    total = gpu.played("stream", kind, of="torch_plays")
    assert total == 2000.0 or kind in ("forgets", "untold")
    lines = gpu.told()
    assert len(lines) == (0 if told is None else 1), lines
    assert told is None or told in lines[0]


@pytest.mark.slow
def test_a_copy_from_pinned_memory_is_as_late_as_its_stream(gpu: OnGpu) -> None:
    """It takes what is in the memory by then, and torch does not give that memory to others before."""
    values, is_given = gpu.played("copies", of="torch_plays")
    assert 2.0 in values
    assert not is_given


@pytest.mark.slow
def test_errors_to_order_are_torchs(gpu: OnGpu) -> None:
    """A launch that fails and memory that is not there arrive as they do from a GPU."""
    failed = "CUDA error: too many resources requested for launch"
    seen = gpu.played("errors", of="torch_plays", faults="launch@2", memory=10**8, caching=True)
    assert seen == ["fine", failed, "out of memory"]
