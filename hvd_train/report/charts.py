"""A chart as a value: lines over a pair of axes, and what happened meanwhile. `drawing` makes PNG and SVG of it.

No chart needs colour to be read: lines differ in dashes and markers too, and bear their names at their ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hvd_train.progress.clock import duration

NumberFormat = Literal["number", "share", "duration"]
"""How an axis writes its numbers: plainly, as per cent (a share of 1), or as a duration (seconds)."""

Vertices = list[tuple[float, float]]
"""The points (x, y) of a line as it is drawn; NaN as y is a gap."""

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (8, 2, 1.5, 2), (3, 3))
MARKERS = "os^DvXP*"
LIGHT = ("#0063a6", "#b8400e", "#00734f", "#8a3a8a", "#7a5c00", "#1a7a94", "#a3123f", "#4d4d4d")
DARK = ("#6cb6ff", "#ff9d66", "#4fd1a1", "#e39be3", "#e0bd4a", "#6ed3ec", "#ff8aa8", "#c4c4c4")
"""Tones of lines on light and on dark pages; a page sets them as --tone-0 to --tone-7."""


@dataclass(frozen=True)
class Axis:
    """The quantity that an axis measures, and how it is shown."""

    label: str
    unit: str = ""
    log: bool = False
    number_format: NumberFormat = "number"
    ticks: tuple[float, ...] = ()
    """The values to mark; by default the axis marks round numbers."""
    zero: bool = False
    """Whether a y axis begins at 0, so that twice as high is twice as much."""
    end: float | None = None
    """The value at which a y axis ends although a line may go beyond and so leave the chart."""

    def __str__(self) -> str:
        return f"{self.label} [{self.unit}]" if self.unit else self.label


@dataclass(frozen=True)
class Series:
    """A line through points. A value that is None or not finite is a gap; on a log axis so is one that is not above 0.

    `dash`: lengths of strokes and gaps in points, () for a solid line. `tone`: the position of its colour in LIGHT and
    DARK.
    """

    name: str
    x: tuple[float | None, ...]
    y: tuple[float | None, ...]
    dash: tuple[float, ...] = ()
    marker: str = ""
    tone: int = 0


@dataclass(frozen=True)
class Event:
    """Something that happened at a value of the x axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes, and the events to mark among them."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    events: tuple[Event, ...] = ()

    @property
    def description(self) -> str:
        """The chart in one sentence, for readers who hear the page."""
        names = ", ".join(series.name for series in self.series if series.name)
        return f"{self.title}: {self.y} over {self.x}" + (f", of {names}" if names else "")


def vertices_of(series: Series, chart: Chart) -> Vertices:
    """Return the points of a series with NaN as y in its gaps, and none at all where every point is a gap."""
    vertices = []
    for x, y in zip(series.x, series.y, strict=True):
        if x is not None and math.isfinite(x) and (x > 0 or not chart.x.log):
            known = y is not None and math.isfinite(y) and (y > 0 or not chart.y.log)
            vertices.append((x, y if known and y is not None else math.nan))
    return vertices if any(y == y for _, y in vertices) else []


def styled(number: int, name: str, x: Sequence[float | None], y: Sequence[float | None]) -> Series:
    """Return line `number` of a chart, counted from 0: the first 40 differ in dashes, marker or tone."""
    dash, marker = DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)]
    return Series(name, tuple(x), tuple(y), dash, marker, number % len(LIGHT))


def compact(value: float) -> str:
    """Write a number as it stands at an axis: 1500 is 1,500, 25000 is 25k, 1.5e6 is 1.5M."""
    for limit, unit, sign in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if limit <= abs(value) < 1e12:
            return f"{value / unit:g}{sign}"
    if value and not 1e-3 <= abs(value) < 1e12:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


WRITERS: dict[NumberFormat, Callable[[float], str]] = {
    "number": compact,
    "share": lambda value: f"{value * 100:.3g}%",
    "duration": duration,
}
"""Write a value as the numbers at an axis of this format are written."""
