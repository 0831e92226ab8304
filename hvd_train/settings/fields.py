"""Mark a field that may differ on resume, and check the values of fields."""

import math
from dataclasses import field
from typing import TypeVar

from hvd_train.errors import UsageError

T = TypeVar("T")


def free(default: T) -> T:
    """Return a dataclass field that may differ on resume, since it does not change the result."""
    value: T = field(default=default, metadata={"free": True})
    return value


def at_least(flag: str, value: float | None, least: float) -> None:
    """Raise UsageError if a value is below `least`; None passes."""
    if value is not None and not value >= least:
        raise UsageError(f"--{flag} is {value:g}; it must be at least {least:g}")


def positive(flag: str, value: float | None) -> None:
    """Raise UsageError if a value is not finite or not above 0; None passes."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise UsageError(f"--{flag} is {value:g}; it must be a number above 0")


def share(flag: str, value: float) -> None:
    """Raise UsageError if a value lies outside 0 to 1, both included."""
    if not 0 <= value <= 1:
        raise UsageError(f"--{flag} is {value:g}; it must be at least 0 and at most 1")


def within(flag: str, value: float, least: float, below: float) -> None:
    """Raise UsageError if a value is below `least`, or not below `below`."""
    if not least <= value < below:
        raise UsageError(f"--{flag} is {value:g}; it must be at least {least:g} and below {below:g}")
