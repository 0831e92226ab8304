"""The charts of a scaling table."""

from __future__ import annotations

import dataclasses

from hvd_train.bench.plots import plots
from hvd_train.bench.scaling_table import Row
from hvd_train.report import drawing


def test_plots_of_whatever_rows() -> None:
    """All failed, one size only, gaps in the middle: still a picture of each."""
    for rows in (
        [Row(1, failed="why")],
        [Row(1, images_per_second=10.0, efficiency=1.0)],
        [Row(1, images_per_second=10.0, efficiency=1.0, epoch_seconds=1.0), Row(2, failed="why"), Row(4, top1=0.5)],
    ):
        for chart in plots([dataclasses.asdict(row) for row in rows], "weak").values():
            assert drawing.png(chart).startswith(b"\x89PNG")
