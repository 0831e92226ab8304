"""Report pages for tests, and their sections."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from hvd_train.report import report

NOW = datetime(2026, 1, 2, 3, 4)


def composed(*paths: Path) -> str:
    """The report of these folders, without predictions."""
    runs, scalings = report.open_all(paths)
    return report.compose(runs, scalings, {}, NOW)


def section(text: str, heading: str) -> str:
    """One section of a page, without the heads that cells repeat for phones."""
    found = re.search(rf"<section[^>]*>\s*<h2>{heading}</h2>(.*?)</section>", text, re.DOTALL)
    assert found is not None, heading
    return re.sub(r' data-head="[^"]*"', "", found.group(1))
