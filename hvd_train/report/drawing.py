"""Charts as pictures: PNG for papers and slides, and SVG for a page, which sets its colours."""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hvd_train.report import hover, ticks
from hvd_train.report.charts import LIGHT, Chart, Event, Series, Vertices, vertices_of

Line = tuple[Series, Vertices]
_ROLES = {"ink": "#222222", "muted": "#666666", "grid": "#dddddd", "paper": "#ffffff"}

_WIDTH, _HEIGHT = 300.0, 205.0  # points, about the width of a phone: text keeps its size there
_TOP, _LEFT, _BOTTOM = 40.0, 40.0, 36.0
_TEXT, _LINE = 10.0, 11.5
_LONGEST_NAME = 22
_MOST_MARKERS, _MARK_ALL = 6, 12


def png(chart: Chart, *, dpi: int = 240) -> bytes:
    """Return the chart as a PNG file, dark on white."""
    picture = io.BytesIO()
    with mpl.rc_context(_style(_ROLES)):
        _draw(chart, LIGHT, _ROLES).savefig(picture, format="png", dpi=dpi, facecolor=_ROLES["paper"])
    return picture.getvalue()


def svg(chart: Chart) -> Markup:
    """Return the chart as an element of a page, which may set --ink, --muted, --grid, --paper and --tone-N."""
    # Colours stand in as numbers that no chart has by chance, until the text is there.
    stand_in = {name: f"#0a0a{number:02x}" for number, name in enumerate(_ROLES)}
    tones = [f"#0a0b{number:02x}" for number in range(len(LIGHT))]
    buffer = io.StringIO()
    salt = f"{zlib.crc32(repr(chart).encode()):08x}"
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({**_style(stand_in), "svg.fonttype": "none", "svg.hashsalt": salt}):
        figure = _draw(chart, tones, stand_in)
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # several charts of a page would have the same
    text = re.sub(r"font-family: [^;\"]*;?", "", text)  # the page has its own
    text = re.sub(r"\s*\n\s*", "\n", text)
    for name, colour in _ROLES.items():
        text = text.replace(stand_in[name], f"var(--{name}, {colour})")
    for number, colour in enumerate(LIGHT):
        text = text.replace(tones[number], f"var(--tone-{number}, {colour})")
    size = re.search(r'viewBox="([^"]*)"', text)
    assert size is not None
    opening = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{}" '
        'role="img" aria-label="{}" style="stroke-linejoin: round">'
    ).format(size[1], chart.description)
    body = text[text.index(">") + 1 : text.rindex("</svg>")].strip()
    drawn = Markup(body)  # noqa: S704  # matplotlib has escaped its texts
    return opening + drawn + hover.stripes(chart, figure) + Markup("</svg>")


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions near the wanted ones (which rise), at least `gap` apart, from low to high as far as they fit."""
    groups: list[tuple[float, int]] = []  # neighbours that touch: the mean of their first one's position, their number
    for index, position in enumerate(wanted):
        mean, count = position - index * gap, 1
        while groups and groups[-1][0] >= mean:
            other, more = groups.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        groups.append((mean, count))
    firsts = [mean for mean, count in groups for _ in range(count)]
    highest = high - (len(firsts) - 1) * gap
    return [max(min(first, highest), low) + index * gap for index, first in enumerate(firsts)]


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
    lines = [(series, vertices_of(series, chart)) for series in chart.series]
    labels = [_label(series, vertices) for series, vertices in lines]
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
    known = [(x, y) for _, vertices in lines for x, y in vertices if y == y]
    if known:
        for number, (series, vertices) in enumerate(lines):
            _draw_line(axes, series, vertices, number, tones)
        ticks.scale(axes, axes.xaxis, chart.x, [x for x, _ in known])
        ticks.scale(axes, axes.yaxis, chart.y, [y for _, y in known])
        _draw_events(axes, chart.events, roles)
        _draw_names(figure, axes, lines, tones, roles)
    else:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", va="center", color=roles["muted"])
    return figure


def _draw_line(axes: Axes, series: Series, vertices: Vertices, number: int, tones: Sequence[str]) -> None:
    axes.plot(
        [x for x, _ in vertices],
        [y for _, y in vertices],
        color=tones[series.tone % len(tones)],
        linewidth=1.5,
        linestyle=(0, series.dash) if series.dash else "-",
        # A point between two gaps is no line: only its marker shows it.
        marker=series.marker or ".",
        markersize=4,
        markevery=_marked([y for _, y in vertices], number if series.marker else None),
    )


def _marked(values: list[float], number: int | None) -> list[int]:
    """Return the positions of the points that get a marker.

    These are the points alone between gaps and, where `number` says which line of the chart this is, a few of the
    others, or all of them where there are few.
    """
    known = [index for index, value in enumerate(values) if value == value]
    alone = {i for i in known if not {i - 1, i + 1} & set(known)}
    if number is None:
        return sorted(alone)
    if len(known) <= _MARK_ALL:
        return known
    step = len(known) / _MOST_MARKERS
    shift = number * 0.37 % 1  # so that markers of lines that lie upon each other stand apart
    return sorted(alone | {known[int((marker + shift) * step)] for marker in range(_MOST_MARKERS)})


def _draw_events(axes: Axes, events: Sequence[Event], roles: dict[str, str]) -> None:
    low, high = axes.get_xlim()
    labelled = -math.inf  # where the last label stands, in points
    for event in sorted(events, key=lambda event: event.at):
        if not low <= event.at <= high:
            continue
        axes.axvline(event.at, color=roles["muted"], linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        position = float(axes.transData.transform((event.at, axes.get_ylim()[0]))[0])
        if position - labelled >= _LINE:
            labelled = position
            transform = axes.get_xaxis_transform()
            label = axes.text(event.at, 0.98, f"{event.label} ", transform=transform, rotation=90, ha="right", va="top")
            label.set(size=_TEXT - 1.5, color=roles["muted"])


def _draw_names(figure: Figure, axes: Axes, lines: list[Line], tones: Sequence[str], roles: dict[str, str]) -> None:
    """Write each line's name beside the plot, near its end and in its colour; below them those without values."""
    height = figure.get_figheight() * 72
    edge = float(axes.transAxes.transform((1, 0))[0])
    ends = []
    for series, vertices in lines:
        if series.name and vertices:
            x, y = axes.transData.transform(next(point for point in reversed(vertices) if point[1] == point[1]))
            ends.append((min(float(y), height - _TOP), float(x), series))  # it may end beyond the axis
    ends.sort(key=lambda end: end[0])
    empty = [series for series, vertices in lines if series.name and not vertices]
    positions = spread([end[0] for end in ends], _LINE, _BOTTOM + _LINE * len(empty), height - _TOP)
    for position, (y, x, series) in zip(positions, ends, strict=True):
        tone = tones[series.tone % len(tones)]
        leader = Line2D(
            ((x + 2) / _WIDTH, (edge + 8) / _WIDTH), (y / height, position / height), color=tone, linewidth=0.5
        )
        leader.set(linestyle=(0, (1, 1.5)), marker=series.marker, markersize=3.5, markevery=[1])
        figure.add_artist(leader)
        figure.text((edge + 13) / _WIDTH, position / height, _short(series.name), color=tone, va="center_baseline")
    for number, series in enumerate(empty):
        position = _BOTTOM + _LINE * (number - 0.5)
        figure.text((edge + 13) / _WIDTH, position / height, _label(series, []), color=roles["muted"], style="italic")


def _label(series: Series, vertices: Vertices) -> str:
    return _short(series.name) + (": no values" if series.name and not vertices else "")


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
