"""The pieces of an HTML page that needs nothing else: no network, no script, light and dark, phone and desk.

Each function hands its arguments to the macro of its name in templates/pieces.html and returns markup. Jinja escapes
every text that goes in; only markup, which these functions and `drawing.svg` have made, goes in as it is.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hvd_train.errors import first_few
from hvd_train.progress.clock import duration
from hvd_train.report.charts import DARK, LIGHT, Chart
from hvd_train.report.drawing import svg

GENERATOR = Markup('<meta name="generator" content="hvd-train report">')
"""Stands near the beginning of every page, so that a later report knows that it may replace the file."""

_MOST_NAMES = 6  # of runs that miss the same; the others are counted
_TEMPLATES = Environment(
    loader=PackageLoader("hvd_train.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PIECES = _TEMPLATES.get_template("pieces.html").module


def document(title: str, subtitle: str, sections: Sequence[tuple[str, Markup]]) -> str:
    """Return a whole page; each section is a heading and the markup below it."""
    return _TEMPLATES.get_template("page.html").render(
        generator=GENERATOR, title=title, subtitle=subtitle, sections=sections, light_tones=LIGHT, dark_tones=DARK
    )


def gap(text: str) -> Markup:
    """Return a note on what is missing and why, set apart from the rest."""
    return _piece("gap", text)


def gaps(notes: Iterable[tuple[str, str]]) -> Markup:
    """Return notes on what several runs miss, given as (run, note); runs that miss the same share a note.

    A note without the name of a run stands alone.
    """
    runs_of: dict[str, list[str]] = {}
    for name, text in notes:
        runs_of.setdefault(text, []).append(name)
    named = {
        text: f"{first_few(names, _MOST_NAMES)}: {text}" if any(names) else text for text, names in runs_of.items()
    }
    return Markup().join(map(gap, named.values()))


def paragraph(text: str) -> Markup:
    """Return a sentence or two that explain what stands beside them."""
    return _piece("paragraph", text)


def heading(text: str) -> Markup:
    """Return a heading below that of the section."""
    return _piece("heading", text)


def cards(facts: Iterable[tuple[str, str]]) -> Markup:
    """Return a few facts, given as (name, value), as cards side by side."""
    return _piece("cards", facts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> Markup:
    """Return a table whose first column names the rows; `numbers` aligns the other columns to the right."""
    return _piece("table", head, rows, numbers)


def shares(head: Sequence[str], rows: Iterable[tuple[str, Sequence[tuple[str, float]]]]) -> Markup:
    """Return a table whose cells are (text, share); a bar below each text is as long as its share, from 0 to 1."""
    return _piece("shares", head, rows)


def matrix(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Markup:
    """Return a confusion matrix: `counts[i][j]` images of class i were taken for class j.

    The larger the share of its row, the darker a cell. A last column says which share of the row is right.
    """
    rows = []
    for row, (name, line) in enumerate(zip(names, counts, strict=True)):
        total = sum(line)
        cells = [(count, round(60 * count / max(1, total)), row == column) for column, count in enumerate(line)]
        rows.append((name, cells, line[row] / total if total else None))
    return _piece("matrix", names, rows)


def pictures(images: Iterable[tuple[bytes, str]]) -> Markup:
    """Return PNG images inside the page itself, each with the text that stands below it."""
    return _piece("pictures", [(base64.b64encode(png).decode(), text) for png, text in images])


def details(summary: str, body: Markup) -> Markup:
    """Return a line that shows what is below it on a click."""
    return _piece("details", summary, body)


def figures(charts: Iterable[Chart]) -> Markup:
    """Return charts side by side, as many in a row as fit."""
    return _piece("figures", [svg(chart) for chart in charts])


def tabs(choices: Sequence[tuple[str, Sequence[Chart]]]) -> Markup:
    """Return up to three sets of charts, given as (name, charts), of which the reader chooses the one to see."""
    return _piece("tabs", [(name, [svg(chart) for chart in charts]) for name, charts in choices])


def written(value: object) -> str:
    """Write a setting or a fact as people read it: True is yes, a list its entries, None `not set`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)


def written_duration(seconds: float) -> str:
    """Write seconds as a duration that no line break divides."""
    return duration(seconds).replace(" ", "\N{NO-BREAK SPACE}")


def _piece(macro: str, *arguments: object) -> Markup:
    piece: Markup = getattr(_PIECES, macro)(*arguments)
    return piece
