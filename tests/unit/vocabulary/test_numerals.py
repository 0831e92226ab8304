"""Whole numbers as text."""

from __future__ import annotations

import pytest

from hvd_train.numerals import whole_number


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("2147483648", 2**31), ("9" * 18, 10**18 - 1)])
def test_digits_are_a_number(text: str, number: int) -> None:
    """Leading zeros do no harm."""
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "²", "١", "-1", "+1", "1.0", "1e3", " 1", "1\n", "1_000", "9" * 19, "9" * 5000])
def test_anything_else_is_none(text: str) -> None:
    """Whatever `str.isdigit` or `int` think of it."""
    assert whole_number(text) is None
