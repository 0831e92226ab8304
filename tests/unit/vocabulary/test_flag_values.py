"""The text after a flag becomes a value, or is refused in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags


@dataclass(frozen=True)
class Options:
    """A field of every kind."""

    rows: int = 1
    share: float | None = 1
    title: str | None = "a title"
    file: Path | None = None
    sizes: tuple[int, ...] | None = None
    shape: Literal["round", "none"] = "round"


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("--rows 3", Options(rows=3)),
        ("--share 1e-3", Options(share=0.001)),
        ("--share None", Options(share=None)),
        ("--title none", Options(title=None)),
        ("--title nonesuch", Options(title="nonesuch")),
        ("--file a", Options(file=Path("a"))),
        ("--sizes 1 2", Options(sizes=(1, 2))),
        ("--sizes NONE", Options(sizes=None)),
        ("--shape None", Options(shape="none")),
        ("--shape Round", Options(shape="round")),
    ],
)
def test_text_becomes_a_value_of_the_fields_type(typed: str, value: Options) -> None:
    """`none` and choices in any case."""
    assert parse_flags(Options, typed.split(), "draw") == value


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--rows 1.5", "--rows: it must be a whole number, not '1.5'"),
        ("--share half", "--share: it must be a number, not 'half'"),
        ("--sizes 1 none", "--sizes: it must be a whole number, not 'none'"),
        ("--shape square", "--shape: it must be one of round, none, not 'square'"),
    ],
)
def test_what_is_no_such_value_is_refused_in_words(typed: str, message: str) -> None:
    """Not in those of Python."""
    with pytest.raises(UsageError) as caught:
        parse_flags(Options, typed.split(), "draw")
    assert str(caught.value) == message
