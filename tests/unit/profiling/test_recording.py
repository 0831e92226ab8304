"""What one rank records, and that a profiler which fails is a problem of the recording only."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from hvd_train.profiling import recording
from hvd_train.profiling.recording import Recording, sample_clocks
from hvd_train.progress.clock import Split
from hvd_train.world.world import LocalWorld


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording sets this for its process; it is taken back after a test."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")


def recorded(split: Split, *steps: int) -> Recording:
    """Record steps that add two numbers."""
    found = Recording(torch.device("cpu"))
    found.start()
    found.clocks = sample_clocks(LocalWorld())
    found.start_steps(split)
    for step in steps:
        torch.ones(2).add(1)
        split.mark("forward")
        found.step_done(step)
    found.stop(split)
    return found


def test_steps_phases_and_operators_are_recorded() -> None:
    """The events of a rank hold all three, and the summary has a line for the phase."""
    split = Split()
    found = recorded(split, 7, 8)
    contribution = found.rank_trace(0, found.clocks)
    assert contribution.problem is None
    events = json.loads(b"[" + gzip.decompress(contribution.events) + b"]")
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert {"step 7", "step 8", "forward", "aten::add"} <= set(names)
    assert any(line.strip().startswith("forward") for line in found.summary())
    assert found.horovods_events(2) == []
    found.close()
    assert found.timeline is not None
    assert not found.timeline.parent.exists()


def test_marks_after_the_end_are_not_recorded() -> None:
    """The split of a training goes on without its recording."""
    split = Split()
    found = recorded(split, 1)
    split.mark("backward")
    found.rank_trace(0, found.clocks)
    assert not any("backward" in line for line in found.summary())
    found.close()


def test_a_recording_without_steps_contributes_nothing() -> None:
    """A training that ends at once leaves neither events nor a problem."""
    found = recorded(Split())
    assert found.rank_trace(0, found.clocks) == recording.RankTrace()
    found.close()
