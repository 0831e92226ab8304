"""The charts of runs."""

from __future__ import annotations

from pathlib import Path

from hvd_train.report import curves
from hvd_train.run_files.history import read_run
from tests.support.run_folders import BATCH, START, start, step, whole_run, write


def test_one_run_that_diverges_leaves_the_others_readable() -> None:
    """The axis of the loss ends where the usual values are, and says so; that of the rate reaches both."""
    good = write(Path("good"), whole_run())
    bad = write(Path("bad"), [start(), step(1, learning_rate=1e6), step(2, loss=1e16), step(3, loss=1e18)])
    charts = curves.learning([read_run(good), read_run(bad)], ["good", "bad"], "epochs")
    loss, rate = charts[0], charts[-1]
    assert loss.y.end is not None
    assert loss.y.end < 100
    assert loss.y.label == f"cross entropy, logarithmic, cut at {loss.y.end:g}"
    assert rate.y.log
    assert rate.series[0].y[0] == 0.1
    assert curves.learning([read_run(good)], ["good"], "epochs")[0].y.end is None


def test_the_ideal_is_that_of_the_fewest_workers() -> None:
    """From two workers on, four are to be twice as fast."""
    rows = [{"workers": n, "images_per_second": rate, "efficiency": 1.0} for n, rate in ((2, 100.0), (4, 150.0))]
    lines = {line.name: line.y for line in curves.scaling(rows)[0].series}
    assert tuple(lines["ideal"]) == (100.0, 200.0)


def test_marks_of_a_run_that_was_resumed() -> None:
    """The first start is no mark, the second is; an event without a step stands where the last step before it was."""
    skipped = {"kind": "event", "name": "skipped", "message": "not finite", "time": START + 2.5}
    lines = [start(), step(1), step(2), skipped, step(3), start(3.5), step(4)]
    run = read_run(write(Path("run"), lines))
    marks = [(mark.label, mark.at) for mark in curves.events_of(run, "samples")]
    assert marks == [("not finite", 2 * BATCH), ("resumed", 3 * BATCH)]
    assert [mark.label for mark in curves.events_of(run, "time")] == ["not finite", "resumed"]
