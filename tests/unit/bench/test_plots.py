"""The charts of a scaling table, and of the speed over the batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hvd_train.bench import batch_search
from hvd_train.bench.plots import check_target, plots, speed_over_batch, write
from hvd_train.bench.scaling_table import Row
from hvd_train.errors import UsageError
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


def test_the_speed_over_the_batch(tmp_path: Path) -> None:
    """Sizes that failed are no points, and those between powers of two no marks; PNG and SVG by the name."""
    rows = [batch_search.Row(size, speed) for size, speed in ((8, 50.0), (16, 90.0), (20, 95.0))]
    rows.append(batch_search.Row(24, failed="out of memory"))
    chart = speed_over_batch([dataclasses.asdict(row) for row in rows], "images")
    assert (chart.series[0].x, chart.series[0].y) == ((8, 16, 20), (50.0, 90.0, 95.0))
    assert chart.x.ticks == (8, 16)
    write(tmp_path / "a.png", chart)
    write(tmp_path / "a.svg", chart)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.svg").read_text().startswith("<svg xmlns=")
    for name, words in (("a.png", "exists"), ("a.pdf", "must end in .png or .svg"), ("gone/a.png", "no folder")):
        with pytest.raises(UsageError, match=words):
            check_target(tmp_path / name)
