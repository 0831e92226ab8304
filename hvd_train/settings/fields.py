"""What the groups of settings share: the mark of a field that may differ on resume, and checks of a field's value."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import TypeVar

from hvd_train.errors import UsageError, unknown_name
from hvd_train.plugin import check_spelling, is_reference

T = TypeVar("T")


def free(default: T) -> T:
    """Return a dataclass field with this default that says where or how often, not what: it may differ on resume."""
    value: T = field(default=default, metadata={"free": True})
    return value


def is_none(value: object) -> bool:
    """Return whether a value is the text `none`, in capitals or not."""
    return isinstance(value, str) and value.lower() == "none"


def to_known_name(config: object, kind: str, known: Collection[str]) -> None:
    """Give the setting `kind` in small letters where it names something in `known`, in capitals or not.

    Raises UsageError for what is neither in `known` nor a reference to the user's own code.
    """
    value: str = getattr(config, kind)
    if value.lower() in known:
        object.__setattr__(config, kind, value.lower())  # the config is frozen, and being made
        return
    check_spelling(kind, value)
    if not is_reference(value):
        raise unknown_name(kind, value, known)


def to_paths(config: object, *names: str) -> None:
    """Make paths of those of the settings `names` that are texts, as a program may give them."""
    for name in names:
        if isinstance(value := getattr(config, name), str):
            object.__setattr__(config, name, Path(value))  # the config is frozen, and being made


def at_least(flag: str, value: float | None, least: float) -> None:
    """Raise UsageError where a value is below `least`; None, which stands for the default, passes every check."""
    if value is not None and not value >= least:
        raise UsageError(f"--{flag} is {value:g}; it must be at least {least:g}")


def positive(flag: str, value: float | None) -> None:
    """Raise UsageError where a value is not finite or not above 0; None passes."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise UsageError(f"--{flag} is {value:g}; it must be a number above 0")


def share(flag: str, value: float) -> None:
    """Raise UsageError where a value lies outside 0 to 1, both included."""
    if not 0 <= value <= 1:
        raise UsageError(f"--{flag} is {value:g}; it must be at least 0 and at most 1")


@cache  # a training asks in each step
def seconds_in(flag: str, text: str | None) -> float | None:
    """Return the seconds of a time such as 2h30m; None for None. Raises UsageError for what is not a time."""
    if text is None:
        return None
    number = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
    with_unit = f"{text}s" if re.fullmatch(number, text) else text
    match = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", with_unit)
    if not match or not any(match.groups()):
        raise UsageError(f"--{flag} {text}: write it as in 2h30m, 1.5h, 90m or 45s; a number alone is seconds")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def within(flag: str, value: float, least: float, below: float) -> None:
    """Raise UsageError where a value is below `least`, or not below `below`."""
    if not least <= value < below:
        raise UsageError(f"--{flag} is {value:g}; it must be at least {least:g} and below {below:g}")
