"""Report pages for tests, and their sections."""

import base64
import re
from datetime import datetime
from pathlib import Path

from hvd_train.report import report

NOW = datetime(2026, 1, 2, 3, 4)


def composed(*paths: Path) -> str:
    runs, scalings = report.open_all(paths)
    return report.compose(runs, scalings, {}, NOW)


def section(text: str, heading: str) -> str:
    """Return the markup of a section, with the SVG of its charts as text."""
    found = re.search(rf"<section[^>]*>\s*<h2>{heading}</h2>(.*?)</section>", text, re.DOTALL)
    assert found is not None, heading
    return re.sub(r"data:image/svg\+xml;base64,([^\"]*)", lambda image: base64.b64decode(image[1]).decode(), found[1])
