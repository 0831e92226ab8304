"""The page of the benchmarks, which nobody edits."""

from __future__ import annotations

from benchmarks.page import PAGE, page


def test_the_page_shows_the_records() -> None:
    """docs/benchmarks.md is what `python -m benchmarks.page` makes of the records."""
    assert page() == PAGE.read_text(encoding="utf-8")
