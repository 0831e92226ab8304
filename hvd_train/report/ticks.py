"""The scale of an axis in a drawing: linear or logarithmic, where it is marked, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, MultipleLocator, NullLocator

from hvd_train.report.charts import WRITERS, Axis


def scale(axes: Axes, drawn: XAxis | YAxis, axis: Axis, values: Sequence[float]) -> None:
    """Give a drawn axis the scale that its description asks for. `values` are those of the lines along it."""
    if axis.log:
        (axes.set_xscale if drawn is axes.xaxis else axes.set_yscale)("log")
    if axis.zero:
        axes.set_ylim(bottom=0)
    if axis.end is not None:
        axes.set_ylim(top=axis.end)
    low, high = drawn.get_view_interval()
    if axis.ticks:
        drawn.set_major_locator(FixedLocator(axis.ticks))
        drawn.set_minor_locator(NullLocator())
    elif axis.log:
        drawn.set_minor_locator(NullLocator())
        drawn.set_major_locator(FixedLocator(_log_ticks(low, high)))
    elif axis.number_format == "duration":
        drawn.set_major_locator(MultipleLocator(_seconds_between_ticks(high - low)))
    else:
        whole = all(value == round(value) for value in values) and axis.number_format == "number"
        drawn.set_major_locator(MaxNLocator(5, integer=whole))
    write = WRITERS[axis.number_format]
    drawn.set_major_formatter(FuncFormatter(lambda value, _: write(value) if value >= low or value > 0 else ""))


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from low to high: powers of ten, with multiples of them where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks[:: -(-len(ticks) // 9)] or [low]


def _seconds_between_ticks(width: float) -> float:
    """Return a round number of seconds, minutes, hours or days that cuts `width` seconds into about five."""
    for unit in (1, 60, 3600, 86400):
        for count in (1, 2, 5, 10, 15, 30) if unit < 3600 else (1, 2, 4, 6, 12):
            if unit * count * 5 >= width:
                return unit * count if width > 3 else max(width / 4, 1e-3)
    return 86400.0 * math.ceil(width / 86400 / 5)
