"""Render the pieces of a page that needs no network, from templates/, and its charts."""

import base64
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from hvd_train.console import printable

TEMPLATES = Environment(
    loader=PackageLoader("hvd_train.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["base64"] = lambda content: base64.b64encode(content).decode()
SCRIPT = (Path(__file__).parent / "templates" / "page.js").read_text(encoding="utf-8")
# the browser runs no other script
DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# the macros of pieces.html; each returns markup
pieces: Any = TEMPLATES.get_template("pieces.html").module


def written(value: object) -> str:
    """Write a setting or a fact: True as yes, None as `not set`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {of_key}" for key, of_key in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)


def clean(text: str) -> str:
    """Return a text that UTF-8 can hold, without control characters."""
    return printable(text, keep="\n\t").encode(errors="replace").decode()


# name, x, y; None, NaN and infinity leave a gap
Line = tuple[str, Sequence[float | None], Sequence[float | None]]

_STYLE = Path(__file__).parent / "templates" / "charts.mplstyle"
_WIDTH = 4.2  # inches; on a phone the text of this width keeps its size
_PLOT = 1.95
_ABOVE = 0.25
_LEGEND_WIDTH = 44  # letters in a row of the legend, inches of its height
_ROW = 0.19
_DIVERGED = 1000  # times the median is a value beyond which the others would be one flat line
_GREY = "#5c6068"


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes."""

    title: str
    x: str
    lines: Sequence[Line]
    percent: bool = False  # y values are fractions of 1, written as percentages
    zero: bool = False  # the y axis begins at 0
    events: Sequence[tuple[float, str]] = ()  # x values and labels of vertical lines

    @property
    def description(self) -> str:
        """The chart in one sentence, for screen readers."""
        return (
            f"{self.title} over {self.x}: "
            f"{', '.join(name for name, _, _ in self.lines if name) or 'one line'}"
        )

    def shown(self) -> tuple[bytes, str]:
        """Return the chart as an "svg" file, and JSON of its values, which
        page.js shows at the pointer.
        """
        with matplotlib.style.context(_STYLE):
            figure = self._figure()
            image = io.BytesIO()
            figure.savefig(image, format="svg", transparent=True)
        (axes,) = figure.axes
        of_lines = zip(self.lines, axes.lines, strict=False)  # lines of events follow
        lines = [
            {
                "name": name,
                "colour": line.get_color(),
                "x": _rounded(line.get_xdata()),
                "y": _rounded(line.get_ydata()),
            }
            for (name, _, _), line in of_lines
        ]
        values = {
            "axis": self.x,
            "box": list(axes.get_position().extents),
            "limits": axes.get_xlim(),
            "percent": self.percent,
            "lines": lines,
        }
        return image.getvalue(), json.dumps(values)

    def _figure(self) -> Figure:
        longest = max((len(name) for name, _, _ in self.lines), default=0)
        columns = max(1, _LEGEND_WIDTH // (longest + 7))
        below = _ROW * (3 + (-(-len(self.lines) // columns) if longest else 0))
        figure = Figure(figsize=(_WIDTH, _ABOVE + _PLOT + below))
        figure.subplots_adjust(
            top=1 - _ABOVE / figure.get_figheight(), bottom=below / figure.get_figheight()
        )
        axes = figure.add_subplot(xlabel=self.x)
        axes.set_title(clean(self.title))
        if sum(self._draw(axes, line) for line in self.lines):
            self._scale(axes)
            self._mark_events(axes)
        else:
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", va="center")
        if longest:
            figure.legend(loc="lower left", ncols=columns)
        return figure

    def _draw(self, axes: Axes, line: Line) -> int:
        """Draw a line and return how many of its points have a value."""
        name = line[0]
        x = np.array(line[1], float)
        y = np.array(line[2], float)
        known = np.isfinite(x) & np.isfinite(y)
        y[~known] = np.nan
        # the blank: matplotlib hides names that begin with "_"
        label = f" {clean(name)}" if name else ""
        if name and not known.any():
            label += ": no values"
        axes.plot(x, y, label=label, markevery=max(1, len(x) // 8))
        return int(known.sum())

    def _scale(self, axes: Axes) -> None:
        known = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
        if (
            not self.zero
            and np.nanmin(known) > 0
            and np.nanmax(known) > _DIVERGED * np.nanmedian(known)
        ):
            axes.set_yscale("log")
        if self.zero:
            axes.set_ylim(0, 1.05 * axes.dataLim.ymax)
        axes.xaxis.set_major_formatter("{x:,.6g}")
        axes.yaxis.set_major_formatter(PercentFormatter(1) if self.percent else "{x:,.6g}")

    def _mark_events(self, axes: Axes) -> None:
        low, high = axes.get_xlim()
        labelled = float("-inf")
        for at, label in sorted(event for event in self.events if low <= event[0] <= high):
            axes.axvline(at, color=_GREY, linewidth=0.8, linestyle=":", zorder=1)
            if at - labelled > 0.05 * (high - low):  # else the labels would overlap
                labelled = at
                above = axes.get_xaxis_transform()
                axes.text(
                    at,
                    0.98,
                    clean(label),
                    transform=above,
                    rotation=90,
                    ha="right",
                    va="top",
                    size=8,
                    color=_GREY,
                )


def _rounded(values: Any) -> list[float | None]:
    return [
        float(f"{value:.5g}") if np.isfinite(value) else None for value in np.asarray(values, float)
    ]
