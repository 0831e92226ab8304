"""Which types ranks may send to one another."""

from __future__ import annotations

from hvd_train import errors
from hvd_train.travel import TYPES, may_travel


def test_every_error_of_ours_may_travel() -> None:
    """An error on one rank is told on all."""
    ours = [errors.HvdTrainError, *errors.HvdTrainError.__subclasses__()]
    assert len(ours) > 5
    assert {*ours} <= {*TYPES}


def test_a_type_is_listed_where_it_is_defined() -> None:
    """And stays what it is."""

    class Letter:
        """Something to send."""

    assert may_travel(Letter) is Letter
    assert TYPES.pop() is Letter
