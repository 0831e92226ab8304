"""The scales of drawn axes."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from hvd_train.report import ticks
from hvd_train.report.charts import Axis


def marks(axis: Axis, *values: float) -> list[str]:
    """The texts at a y axis over these values, within its ends."""
    axes = Figure().add_subplot()
    axes.plot(values)
    ticks.scale(axes, axes.yaxis, axis, values)
    low, high = axes.get_ylim()
    return [
        text.get_text()
        for place, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        if low <= place <= high
    ]


@pytest.mark.parametrize(
    ("axis", "values", "expected"),
    [
        (Axis("x"), (0, 1, 2, 3), ["0", "1", "2", "3"]),
        (Axis("x"), (0, 20000, 40000), ["0", "10k", "20k", "30k", "40k"]),
        (Axis("x", number_format="share"), (0.0, 0.5, 1.0), ["0%", "25%", "50%", "75%", "100%"]),
        (Axis("x", log=True), (1, 1000), ["1", "10", "100", "1,000"]),
        (Axis("x", log=True), (1, 9), ["1", "3", "10"]),
        (Axis("x", ticks=(1, 4)), (1, 2, 4), ["1", "4"]),
        (Axis("x", number_format="duration"), (0, 250), ["0", "1:00", "2:00", "3:00", "4:00"]),
        (Axis("x", zero=True), (5, 6), ["0", "2", "4", "6"]),
        (Axis("x", log=True, end=10), (1, 1000), ["1", "3", "10"]),
    ],
)
def test_marks_are_few_and_round(axis: Axis, values: tuple[float, ...], expected: list[str]) -> None:
    """About five of them, as people count: whole numbers, shares, decades, minutes."""
    assert marks(axis, *values) == expected
