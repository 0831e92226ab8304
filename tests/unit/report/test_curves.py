"""The charts of runs."""

from __future__ import annotations

from pathlib import Path

from hvd_train.report import curves
from hvd_train.run_files.history import read
from tests.support.run_folders import start, step, whole_run, write


def test_one_run_that_diverges_leaves_the_others_readable() -> None:
    """The axis of the loss ends where the usual values are, and says so; that of the rate reaches both."""
    good = write(Path("good"), whole_run())
    bad = write(Path("bad"), [start(), step(1, learning_rate=1e6), step(2, loss=1e16), step(3, loss=1e18)])
    charts = curves.learning([read(good), read(bad)], ["good", "bad"], "epochs")
    loss, rate = charts[0], charts[-1]
    assert loss.y.end is not None
    assert loss.y.end < 100
    assert loss.y.label == f"cross entropy, logarithmic, cut at {loss.y.end:g}"
    assert rate.y.log
    assert rate.series[0].y[0] == 0.1
    assert curves.learning([read(good)], ["good"], "epochs")[0].y.end is None
