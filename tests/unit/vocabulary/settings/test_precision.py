"""Settings of number formats: what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.refused import assert_refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_skipped_steps": 0}, "--max-skipped-steps is 0; it must be at least 1"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    """The message names the flag, the value and what it must be."""
    assert_refused(changes, message)
