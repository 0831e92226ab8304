"""A chart as a value, and its two forms: PNG bytes, and SVG for a page, which sets its colours.

No chart needs colour to be read: lines differ in dashes and markers too, and bear their names at their ends.
"""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, MultipleLocator, NullLocator

from hvd_train.progress.clock import duration

Form = Literal["number", "share", "duration"]


@dataclass(frozen=True)
class Axis:
    """What is measured along an axis. `form`: shares of 1 are written as per cent, seconds as durations."""

    label: str
    unit: str = ""
    log: bool = False
    form: Form = "number"
    ticks: tuple[float, ...] = ()
    """Where the axis is to be marked; by default at round numbers."""
    zero: bool = False
    """Whether it begins at 0, so that twice as high is twice as much."""
    end: float | None = None
    """Where it ends, though there may be more: a line beyond leaves the chart."""

    def __str__(self) -> str:
        return f"{self.label} [{self.unit}]" if self.unit else self.label


@dataclass(frozen=True)
class Series:
    """A line through points. A value that is None or not finite is a gap; on a log axis so is one that is not above 0.

    `dash`: lengths of strokes and gaps in points, () for a solid line. `tone`: which colour of the page.
    """

    name: str
    x: tuple[float | None, ...]
    y: tuple[float | None, ...]
    dash: tuple[float, ...] = ()
    marker: str = ""
    tone: int = 0


@dataclass(frozen=True)
class Event:
    """Something that happened at a place of the x axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes, and what happened meanwhile."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    events: tuple[Event, ...] = ()


DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (8, 2, 1.5, 2), (3, 3))
MARKERS = "os^DvXP*"
LIGHT = ("#0063a6", "#b8400e", "#00734f", "#8a3a8a", "#7a5c00", "#1a7a94", "#a3123f", "#4d4d4d")
DARK = ("#6cb6ff", "#ff9d66", "#4fd1a1", "#e39be3", "#e0bd4a", "#6ed3ec", "#ff8aa8", "#c4c4c4")
"""Tones of series on light and on dark pages; a page sets them as --tone-0 to --tone-7."""
Points = list[tuple[float, float]]
"""Of a line as it is drawn; NaN as y is a gap."""
Line = tuple[Series, Points]
_ROLES = {"ink": "#222222", "muted": "#666666", "grid": "#dddddd", "paper": "#ffffff"}

_WIDTH, _HEIGHT = 300.0, 205.0  # points, about the width of a phone: text keeps its size there
_TOP, _LEFT, _BOTTOM = 40.0, 40.0, 36.0
_TEXT, _LINE = 10.0, 11.5
_LONGEST_NAME = 22
_MOST_MARKERS, _MARK_ALL = 6, 12


def styled(number: int, name: str, x: Sequence[float | None], y: Sequence[float | None]) -> Series:
    """The series at a place of a chart: with dashes, marker and tone that no other among 40 has together."""
    dash, marker = DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)]
    return Series(name, tuple(x), tuple(y), dash, marker, number % len(LIGHT))


def png(chart: Chart, *, dpi: int = 240) -> bytes:
    """The chart as a picture, dark on white."""
    picture = io.BytesIO()
    with mpl.rc_context(_style(_ROLES)):
        _draw(chart, LIGHT, _ROLES).savefig(picture, format="png", dpi=dpi, facecolor=_ROLES["paper"])
    return picture.getvalue()


def svg(chart: Chart) -> str:
    """The chart as an element of a page, which may set --ink, --muted, --grid, --paper and --tone-N."""
    # Colours stand in as numbers that no chart has by chance, until the text is there.
    stand_in = {name: f"#0a0a{number:02x}" for number, name in enumerate(_ROLES)}
    tones = [f"#0a0b{number:02x}" for number in range(len(LIGHT))]
    buffer = io.StringIO()
    salt = f"{zlib.crc32(repr(chart).encode()):08x}"
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({**_style(stand_in), "svg.fonttype": "none", "svg.hashsalt": salt}):
        _draw(chart, tones, stand_in).savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # several charts of a page would have the same
    text = re.sub(r"font-family: [^;\"]*;?", "", text)  # the page's own
    text = re.sub(r"\s*\n\s*", "\n", text)
    for name, colour in _ROLES.items():
        text = text.replace(stand_in[name], f"var(--{name}, {colour})")
    for number, colour in enumerate(LIGHT):
        text = text.replace(tones[number], f"var(--tone-{number}, {colour})")
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {size.group()} '
        f'role="img" aria-label="{escape(_described(chart))}" style="stroke-linejoin: round">'
    )
    return opening + text[text.index(">") + 1 :].strip()


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones (which rise), at least `gap` apart, between low and high as far as they fit."""
    groups: list[tuple[float, int]] = []  # neighbours that touch: the mean of their first one's place, and how many
    for index, place in enumerate(wanted):
        mean, count = place - index * gap, 1
        while groups and groups[-1][0] >= mean:
            other, more = groups.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        groups.append((mean, count))
    firsts = [mean for mean, count in groups for _ in range(count)]
    highest = high - (len(firsts) - 1) * gap
    return [max(min(first, highest), low) + index * gap for index, first in enumerate(firsts)]


def compact(value: float) -> str:
    """A number as it stands at an axis: 1500 is 1,500, 25000 is 25k, 1.5e6 is 1.5M."""
    for limit, unit, sign in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if limit <= abs(value) < 1e12:
            return f"{value / unit:g}{sign}"
    if value and not 1e-3 <= abs(value) < 1e12:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _described(chart: Chart) -> str:
    names = ", ".join(series.name for series in chart.series if series.name)
    return f"{chart.title}: {chart.y} over {chart.x}" + (f", of {names}" if names else "")


def _style(roles: dict[str, str]) -> Any:
    ink, muted = roles["ink"], roles["muted"]
    return {
        "font.size": _TEXT,
        "text.color": ink,
        "text.parse_math": False,  # a run's name may have dollars
        "axes.edgecolor": muted,
        "axes.labelcolor": muted,
        "xtick.color": muted,
        "xtick.labelsize": _TEXT - 1,
        "ytick.labelsize": _TEXT - 1,
        "ytick.color": muted,
        "grid.color": roles["grid"],
        "axes.unicode_minus": True,
    }


def _draw(chart: Chart, tones: Sequence[str], roles: dict[str, str]) -> Figure:
    lines = [(series, _points(series, chart)) for series in chart.series]
    labels = [_label(series, points) for series, points in lines]
    height = max(_HEIGHT, _TOP + _BOTTOM + _LINE * (len(labels) + 1))
    right = 18 + 0.62 * _TEXT * max(map(len, labels), default=0)  # a letter is about 0.6 of its height wide
    figure = Figure(figsize=(_WIDTH / 72, height / 72), dpi=72)
    axes = figure.add_axes(
        (_LEFT / _WIDTH, _BOTTOM / height, (_WIDTH - _LEFT - right) / _WIDTH, 1 - (_TOP + _BOTTOM) / height)
    )
    figure.text(4 / _WIDTH, 1 - 13 / height, chart.title, weight="bold", size=_TEXT + 1)
    figure.text(4 / _WIDTH, 1 - 27 / height, str(chart.y), color=roles["muted"])
    axes.set_xlabel(str(chart.x))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(linewidth=0.6)
    axes.set_axisbelow(True)
    there = [(x, y) for _, points in lines for x, y in points if y == y]
    if there:
        for number, (series, points) in enumerate(lines):
            _line(axes, series, points, number, tones)
        _scale(axes, axes.xaxis, chart.x, [x for x, _ in there])
        _scale(axes, axes.yaxis, chart.y, [y for _, y in there])
        _mark(axes, chart.events, roles)
        _name(figure, axes, lines, tones, roles)
    else:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", va="center", color=roles["muted"])
    return figure


def _points(series: Series, chart: Chart) -> Points:
    """The points, with NaN as y where there is a gap; none where there is nothing but gaps."""
    points = []
    for x, y in zip(series.x, series.y, strict=True):
        if x is not None and math.isfinite(x) and (x > 0 or not chart.x.log):
            there = y is not None and math.isfinite(y) and (y > 0 or not chart.y.log)
            points.append((x, y if there and y is not None else math.nan))
    return points if any(y == y for _, y in points) else []


def _line(axes: Axes, series: Series, points: Points, number: int, tones: Sequence[str]) -> None:
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=tones[series.tone % len(tones)],
        linewidth=1.5,
        linestyle=(0, series.dash) if series.dash else "-",
        # A point between two gaps is no line: only its marker shows it.
        marker=series.marker or ".",
        markersize=4,
        markevery=_marked([y for _, y in points], number if series.marker else None),
    )


def _marked(values: list[float], number: int | None) -> list[int]:
    """Which points get a marker: those alone between gaps, and a few or all where the line has one (number given)."""
    there = [index for index, value in enumerate(values) if value == value]
    alone = {i for i in there if not {i - 1, i + 1} & set(there)}
    if number is None:
        return sorted(alone)
    if len(there) <= _MARK_ALL:
        return there
    step = len(there) / _MOST_MARKERS
    shift = number * 0.37 % 1  # so that those of lines upon each other stand apart
    return sorted(alone | {there[int((place + shift) * step)] for place in range(_MOST_MARKERS)})


def _scale(axes: Axes, axis: XAxis | YAxis, meant: Axis, values: list[float]) -> None:
    if meant.log:
        (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    if meant.zero:
        axes.set_ylim(bottom=0)
    if meant.end is not None:
        axes.set_ylim(top=meant.end)
    low, high = axis.get_view_interval()
    if meant.ticks:
        axis.set_major_locator(FixedLocator(meant.ticks))
        axis.set_minor_locator(NullLocator())
    elif meant.log:
        axis.set_minor_locator(NullLocator())
        axis.set_major_locator(FixedLocator(_log_ticks(low, high)))
    elif meant.form == "duration":
        axis.set_major_locator(MultipleLocator(_seconds_between_ticks(high - low)))
    else:
        whole = all(value == round(value) for value in values) and meant.form == "number"
        axis.set_major_locator(MaxNLocator(5, integer=whole))
    forms = {"number": compact, "share": lambda value: f"{value * 100:.3g}%", "duration": duration}
    written = forms[meant.form]
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(value) if value >= low or value > 0 else ""))


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two: powers of ten, with 2 and 5 times these where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks[:: -(-len(ticks) // 9)] or [low]


def _seconds_between_ticks(width: float) -> float:
    for unit in (1, 60, 3600, 86400):
        for count in (1, 2, 5, 10, 15, 30) if unit < 3600 else (1, 2, 4, 6, 12):
            if unit * count * 5 >= width:
                return unit * count if width > 3 else max(width / 4, 1e-3)
    return 86400.0 * math.ceil(width / 86400 / 5)


def _mark(axes: Axes, events: Sequence[Event], roles: dict[str, str]) -> None:
    low, high = axes.get_xlim()
    written = -math.inf  # where the last label stands, in points
    for event in sorted(events, key=lambda event: event.at):
        if not low <= event.at <= high:
            continue
        axes.axvline(event.at, color=roles["muted"], linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        place = float(axes.transData.transform((event.at, axes.get_ylim()[0]))[0])
        if place - written >= _LINE:
            written = place
            transform = axes.get_xaxis_transform()
            label = axes.text(event.at, 0.98, f"{event.label} ", transform=transform, rotation=90, ha="right", va="top")
            label.set(size=_TEXT - 1.5, color=roles["muted"])


def _name(figure: Figure, axes: Axes, lines: list[Line], tones: Sequence[str], roles: dict[str, str]) -> None:
    """Write each line's name beside the plot, near its end and in its colour; below them those without values."""
    height = figure.get_figheight() * 72
    edge = float(axes.transAxes.transform((1, 0))[0])
    ends = []
    for series, points in lines:
        if series.name and points:
            x, y = axes.transData.transform(next(point for point in reversed(points) if point[1] == point[1]))
            ends.append((min(float(y), height - _TOP), float(x), series))  # it may end beyond the axis
    ends.sort(key=lambda end: end[0])
    empty = [series for series, points in lines if series.name and not points]
    places = spread([end[0] for end in ends], _LINE, _BOTTOM + _LINE * len(empty), height - _TOP)
    for place, (y, x, series) in zip(places, ends, strict=True):
        tone = tones[series.tone % len(tones)]
        way = Line2D(((x + 2) / _WIDTH, (edge + 8) / _WIDTH), (y / height, place / height), color=tone, linewidth=0.5)
        way.set(linestyle=(0, (1, 1.5)), marker=series.marker, markersize=3.5, markevery=[1])
        figure.add_artist(way)
        figure.text((edge + 13) / _WIDTH, place / height, _short(series.name), color=tone, va="center_baseline")
    for number, series in enumerate(empty):
        place = _BOTTOM + _LINE * (number - 0.5)
        figure.text((edge + 13) / _WIDTH, place / height, _label(series, []), color=roles["muted"], style="italic")


def _label(series: Series, points: Points) -> str:
    return _short(series.name) + (": no values" if series.name and not points else "")


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
