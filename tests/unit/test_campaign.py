"""What a campaign of faults goes by: the size of its state, what it sees of a training, and the phases it times."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import large_model, phases
from tests.support.phases import FILE, POINTS
from tests.support.watch import Watch


def test_its_state_has_500_mb() -> None:
    """Weights, momenta and moving average of the model have 500 MB together."""
    with torch.device("meta"):
        wide = nn.Linear(64, large_model.UNITS)
    assert 3 * sum(parameter.nbytes for parameter in wide.parameters()) == pytest.approx(500e6, rel=0.01)


@pytest.mark.parametrize("point", POINTS.values(), ids=list(POINTS))
def test_what_it_times_is_there(point: str) -> None:
    """Each function whose calls are timed exists under its name: one that is renamed must be renamed there, too."""
    owner, name = phases.found(point)
    assert callable(getattr(owner, name))


def test_a_step_that_is_taken_again_is_a_lost_one(tmp_path: Path) -> None:
    """The watch counts the steps by which a training goes back, and finds the longest time without a step."""
    metrics = tmp_path / "runs/digits-1/metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    begun = time.time()
    watch = Watch(tmp_path)
    steps = [json.dumps({"kind": "step", "time": at, "step": step}) + "\n" for at, step in enumerate((1, 2, 3, 4, 5))]
    for count in (1, 2, 5):
        metrics.write_text('{"kind": "event"}\n' + "".join(steps[:count]) + '{"kind": "step", "ti')
        watch.look()
    assert (watch.last, watch.lost) == (5, 0)
    again = [line.replace('"time": ', '"time": 10') for line in steps]
    metrics.write_text("".join([*steps[:4], again[4]]))
    watch.look()
    assert (watch.last, watch.lost) == (5, 1)
    metrics.write_text("".join([*steps[:2], *again[2:4]]))
    watch.look()
    assert (watch.last, watch.lost) == (4, 3)
    watch.steps = [(begun + at, 1 + at) for at in (0, 1, 3, 7, 8)]
    assert watch.pause(begun + 0.5).seconds == pytest.approx(4)
    assert watch.pause(begun + 7.5).seconds == pytest.approx(1)


def test_a_phase_that_fails_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has a line with its begin, its length and what it raised."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError):
        phases.timed("division", lambda: 1 / 0)()
    (line,) = map(json.loads, Path(FILE).read_text().splitlines())
    assert line["phase"] == "division"
    assert line["failed"].startswith("ZeroDivisionError")
