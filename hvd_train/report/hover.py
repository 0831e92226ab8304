"""The values of a chart where the pointer is: stripes over its plot, whose titles browsers show without a script."""

from __future__ import annotations

from itertools import pairwise

from markupsafe import Markup
from matplotlib.figure import Figure

from hvd_train.report.charts import WRITERS, Chart, vertices_of

_MOST_STRIPES, _MOST_VALUES = 40, 480  # of a chart: a page has dozens, and each value takes some ten bytes


def stripes(chart: Chart, figure: Figure) -> Markup:
    """Return an element for the SVG of a chart that `figure` shows, empty where the chart has no values.

    Each stripe has the values of all lines that have a point in it, that nearest to its middle.
    """
    axes, height = figure.axes[0], figure.get_figheight() * 72
    (left, bottom), (right, top) = axes.transAxes.transform([(0, 0), (1, 1)])
    lines = []
    for series in chart.series:
        if known := [(x, y) for x, y in vertices_of(series, chart) if y == y]:
            places = axes.transData.transform(known)[:, 0].tolist()  # of all at once: it takes long for each
            lines.append((series.name, [(place, x, y) for place, (x, y) in zip(places, known, strict=True)]))
    middles = _middles([place for _, points in lines for place, _, _ in points], len(lines))
    edges = [float(left), *((a + b) / 2 for a, b in pairwise(middles)), float(right)] if middles else []
    found = []
    for middle, (begin, end) in zip(middles, pairwise(edges), strict=True):
        nearest = [
            (name, min(inside, key=lambda point: abs(point[0] - middle)))
            for name, points in lines
            if (inside := [point for point in points if begin <= point[0] <= end])
        ]
        if not nearest:
            continue
        x = min((point for _, point in nearest), key=lambda point: abs(point[0] - middle))[1]
        text = "\n".join(
            [
                f"{chart.x} {WRITERS[chart.x.number_format](float(f'{x:.4g}'))}",
                *(f"{name} {WRITERS[chart.y.number_format](float(f'{point[2]:.4g}'))}" for name, point in nearest),
            ]
        )
        found.append(
            Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>').format(
                begin, height - top, end - begin, top - bottom, text
            )
        )
    return Markup('<g class="hover" fill="none" pointer-events="all">{}</g>').format(Markup().join(found))


def _middles(places: list[float], num_lines: int) -> list[float]:
    """Return where the stripes have their middles, from left to right: at the points or, of many points, evenly."""
    at_points = sorted({round(place, 1) for place in places})
    most = max(8, min(_MOST_STRIPES, _MOST_VALUES // max(1, num_lines)))
    if len(at_points) <= most:
        return at_points
    first, last = at_points[0], at_points[-1]
    return [first + (last - first) * number / (most - 1) for number in range(most)]
