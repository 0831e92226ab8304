"""Render the pieces of a page that needs no network and no script, from templates/."""

import base64
from collections.abc import Iterable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hvd_train.errors import first_few
from hvd_train.progress.clock import duration

TEMPLATES = Environment(
    loader=PackageLoader("hvd_train.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["base64"] = lambda content: base64.b64encode(content).decode()
pieces: Any = TEMPLATES.get_template("pieces.html").module  # the macros of pieces.html; each returns markup


def gaps(notes: Iterable[tuple[str, str]]) -> Markup:
    """Group (name of a run or "", what it misses) by what is missing."""
    runs_of: dict[str, list[str]] = {}
    for name, note in notes:
        runs_of.setdefault(note, []).extend([name] if name else [])
    lines = (f"{first_few(names, 6)}: {note}" if names else note for note, names in runs_of.items())
    return Markup().join(map(pieces.gap, lines))


def written(value: object) -> str:
    """Write a setting or a fact: True as yes, None as `not set`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {of_key}" for key, of_key in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)


def written_duration(seconds: float) -> str:
    """Write seconds as a duration without a line break."""
    return duration(seconds).replace(" ", "\N{NO-BREAK SPACE}")
