"""List our types that ranks may send to one another: what a rank receives must not choose the code to run. No torch."""

from pathlib import PosixPath
from typing import TypeVar

T = TypeVar("T", bound=type)

TYPES: list[type] = [PosixPath]


def may_travel(kind: T) -> T:
    """List a type whose values ranks may send to one another: a plain dataclass, or an error."""
    TYPES.append(kind)
    return kind
