"""What a step asks of a GPU: operators, copies, sums, and how often the host waits. None of it comes back unseen."""

from __future__ import annotations

import json

import pytest

from benchmarks.counts import counted, counts_of
from benchmarks.record import RECORDS
from tests.fake_gpu.launch import OnGpu

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_what_a_step_asks_of_a_gpu(gpu: OnGpu) -> None:
    """Each step has the counts of the record that docs/benchmarks.md shows: what adds to them does so on purpose."""
    recorded = json.loads((RECORDS / "counts.json").read_text())["steps"]
    found = counted(gpu.variables(caching=True), gpu.folder)
    assert {kind: [vars(step) for step in steps] for kind, steps in found.items()} == recorded


def test_notes_are_counted_by_phase() -> None:
    """The operators after the last sum end where the host reads, and what another thread does belongs to the step."""
    counts = counts_of("oFota!oktBc!o!oohwRoUoDs.")
    assert counts.operators == {"data": 1, "forward": 1, "backward": 2, "reduction": 3, "optimizer": 1, "other": 0}
    assert (counts.after_last_sum, counts.waits, counts.arrivals, counts.to_device) == (2, 1, 2, 0)
    assert (counts.agreements, counts.tensors, counts.sums, counts.copies) == (1, 2, 1, 2)
