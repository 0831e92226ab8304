"""What the groups of settings share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hvd_train.errors import UsageError
from hvd_train.settings import fields


def test_a_free_field_has_its_default_and_its_mark() -> None:
    """The mark is what lets a resumed run differ in it."""

    @dataclass
    class Group:
        fixed: int = 1
        free: int = fields.free(2)

    assert Group().free == 2
    assert [field.metadata.get("free", False) for field in dataclasses.fields(Group)] == [False, True]


def test_checks_accept_their_bounds_and_what_was_not_given() -> None:
    """A bound belongs to the values that can be, except where the message says `above` or `below`."""
    fields.at_least("x", 1, 1)
    fields.at_least("x", None, 1)
    fields.positive("x", 1e-300)
    fields.positive("x", None)
    fields.share("x", 0)
    fields.share("x", 1)
    fields.within("x", 0, 0, 1)


@pytest.mark.parametrize(
    ("check", "values"),
    [
        (fields.at_least, (0.5, 1)),
        (fields.at_least, (float("nan"), 1)),
        (fields.positive, (0.0,)),
        (fields.positive, (float("inf"),)),
        (fields.share, (1.1,)),
        (fields.share, (float("nan"),)),
        (fields.within, (1, 0, 1)),
    ],
)
def test_checks_refuse_what_lies_outside(check: Callable[..., None], values: tuple[float, ...]) -> None:
    """By the name of the flag, and NaN is never inside."""
    with pytest.raises(UsageError, match=r"--x is .*; it must be"):
        check("x", *values)
