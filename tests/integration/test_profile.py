"""`--profile` on real ranks gives one trace of all of them and of Horovod."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import traces
from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("launcher", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_two_ranks_and_horovod_are_in_one_trace(launcher: str, tmp_path: Path) -> None:
    """Ranks are processes with the same steps at the same time, and Horovod's reductions lie within them."""
    command = launch_line(launcher, 2, HVD_TRAIN, "train", "digits", "--epochs", "1", "--profile", "4:6")
    code, output = finished([*command, "--output-dir", "run"], tmp_path)
    assert code == 0, output
    assert "profile of steps 4 to 6, on 2 of 2 ranks: run/profile/steps-4-to-6.json.gz" in output
    assert "Horovod's within" in output
    first, second, horovod = traces.read(tmp_path / "run" / "profile" / "steps-4-to-6.json.gz").values()
    for name, began, step in zip(("step 4", "step 5", "step 6"), first["steps"], second["steps"], strict=True):
        assert began["name"] == step["name"] == name
        reduced = [
            [span["ts"] + span["dur"] for span in rank["phases"] if span["name"] == "reduction" and inside(span, own)]
            for rank, own in ((first, began), (second, step))
        ]
        # Neither leaves the reduction of a step before the other has begun its own.
        assert all(end > other["ts"] for ends, other in zip(reduced, (step, began), strict=True) for end in ends)
        assert "ALLREDUCE" in {span["name"] for spans in horovod.values() for span in spans if inside(span, began)}
        # The other rank may ask before this one begins its step; of the first step that is not in the trace then.
        ended = {span["name"] for spans in horovod.values() for span in spans if inside(end_of(span), began)}
        assert "NEGOTIATE_ALLREDUCE" in ended or name == "step 4"
    assert any("grouped_allreduce" in tensor for tensor in horovod)


def end_of(span: traces.Event) -> traces.Event:
    """Return the last moment of a span, as a span."""
    return {"ts": span["ts"] + span["dur"], "dur": 0}


def inside(span: traces.Event, outer: traces.Event) -> bool:
    """Return whether a span lies within the other one."""
    return bool(outer["ts"] <= span["ts"] and span["ts"] + span["dur"] <= outer["ts"] + outer["dur"])
