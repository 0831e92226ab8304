"""Charts as values."""

from __future__ import annotations

from hvd_train.progress.clock import duration
from hvd_train.report.charts import Series, compact, styled


def line(*values: float, number: int) -> Series:
    return styled(number, f"run {number}", range(len(values)), values)


def test_forty_lines_differ_without_colour() -> None:
    """In dashes and markers, or, where these come again after 24, in tone as well."""
    lines = [line(1, number=number) for number in range(40)]
    assert len({(one.dash, one.marker, one.tone) for one in lines}) == 40
    assert len({(one.dash, one.marker) for one in lines[:8]}) == 8


def test_numbers_at_axes_are_short() -> None:
    """As people write them."""
    assert [compact(value) for value in (0.1, 1500, 25000, 1.5e6, 2e9)] == ["0.1", "1,500", "25k", "1.5M", "2G"]
    assert [compact(value) for value in (1e-6, 2.5e16, 0, -0.02)] == ["1e-6", "2.5e16", "0", "-0.02"]
    assert [duration(value) for value in (0, 1.5, 200, 7500)] == ["0", "1.5 s", "3:20", "2:05:00"]
