"""Sums over ranks: their sizes and bandwidths."""

from __future__ import annotations

import pytest

from hvd_train.bench import allreduce
from hvd_train.bench.record import Estimate
from hvd_train.errors import UsageError


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """4 MiB in a millisecond on 4 ranks: 4.19 GB/s of algorithm, and 2 x 3/4 times that on the bus."""
    row = allreduce.Timing("fp32", 2**22, Estimate(1000.0, 0.0), ranks=4).as_dict()
    assert row["algorithm_gb_per_second"] == pytest.approx(4.194304)
    assert row["bus_gb_per_second"] == pytest.approx(4.194304 * 1.5)


def test_sizes_of_sums() -> None:
    """From one size to the other, times four."""
    assert allreduce.sizes("1KB", "65kb") == [1024, 4096, 16384, 65536]
    assert allreduce.sizes("8", "8") == [8]
    assert len(allreduce.sizes("1KB", "256MB")) == 10


@pytest.mark.parametrize("text", ["", "0", "3", "-4", "1.5MB", "x", "4TB", "²KB"])
def test_what_is_no_size(text: str) -> None:
    """Anything but a number of bytes that whole fp32 numbers fill is refused by its flag."""
    with pytest.raises(UsageError, match="--max-size"):
        allreduce.sizes("4", text)
