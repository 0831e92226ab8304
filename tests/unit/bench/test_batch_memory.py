"""Whether a larger batch fits is worked out before it is tried."""

from __future__ import annotations

import resource
from types import SimpleNamespace

import pytest

from hvd_train.bench import batch_memory
from hvd_train.bench.batch_memory import left_for_a_rank, predicted_peak
from hvd_train.world.world import Place

GB = 10**9


def test_the_peak_grows_with_the_samples() -> None:
    """One measured size is enough: what is above the memory before it grows with the batch."""
    assert predicted_peak(2.0 * GB, {8: 3.0 * GB}, 16) == 4.0 * GB


def test_the_steeper_line_counts() -> None:
    """What a first step takes for good makes the line from no samples the steeper one; a peak that hides, the other."""
    assert predicted_peak(1.0 * GB, {8: 2.0 * GB, 16: 2.1 * GB}, 32) == pytest.approx(3.2 * GB)
    assert predicted_peak(2.0 * GB, {8: 2.0 * GB, 16: 2.8 * GB}, 32) == pytest.approx(4.4 * GB)
    assert predicted_peak(1.0 * GB, {4: 9.0 * GB, 8: 2.0 * GB, 16: 2.1 * GB}, 32) == pytest.approx(3.2 * GB)


def test_no_size_takes_less_than_a_smaller_one() -> None:
    """Also where memory was freed since the beginning, so that both lines fall."""
    assert predicted_peak(3.0 * GB, {8: 2.5 * GB, 16: 2.0 * GB}, 32) == 2.0 * GB


@pytest.mark.parametrize(
    ("group", "addresses", "ranks", "left"),
    [
        (None, resource.RLIM_INFINITY, 1, 9.0),
        (None, resource.RLIM_INFINITY, 2, 4.5),
        (4 * GB, resource.RLIM_INFINITY, 2, 1.8),
        (40 * GB, resource.RLIM_INFINITY, 1, 9.0),
        (None, 5 * GB, 1, 2.7),
        (4 * GB, 50 * GB, 2, 1.8),
    ],
)
def test_the_least_of_all_limits_counts(
    group: int | None, addresses: int, ranks: int, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks share the memory of their host and of their control group, and leave a tenth; `ulimit -v` is each one's."""
    monkeypatch.setattr(batch_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GB))
    monkeypatch.setattr(
        batch_memory.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=2 * GB))
    )
    monkeypatch.setattr(batch_memory.control_groups, "memory_left", lambda: group)
    monkeypatch.setattr(batch_memory.resource, "getrlimit", lambda limit: (addresses, addresses))
    assert left_for_a_rank(Place(0, ranks, 0, ranks)) == pytest.approx(left * GB)
