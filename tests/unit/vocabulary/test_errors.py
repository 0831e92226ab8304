"""Errors that a user can meet."""

from __future__ import annotations

import pytest

from hvd_train import errors
from hvd_train.errors import HvdTrainError, unknown_name


def test_every_kind_of_error_has_an_exit_code_of_its_own() -> None:
    """Scripts can tell them apart, and none of them looks like success; a broken GPU ends a job like a lost rank."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HvdTrainError)]
    codes = sorted(kind.exit_code for kind in kinds if kind is not errors.GpuFailed)
    assert codes == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert errors.GpuFailed.exit_code == errors.RankLost.exit_code


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("digit", "did you mean 'digits'?"),
        ("zzzz", "known: cifar10, digits"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_or_with_all(name: str, hint: str) -> None:
    """The kind of name is said as well."""
    assert str(unknown_name("data set", name, ["digits", "cifar10"])) == f"unknown data set {name!r}; {hint}"


def test_of_many_names_twelve_are_listed() -> None:
    """One line stays one line."""
    known = [f"name{number:02}" for number in range(40)]
    assert str(unknown_name("thing", "zzzz", known)).endswith(f"known: {', '.join(known[:12])}")
