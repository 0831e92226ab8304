"""Which of our types ranks may send to one another. No torch.

What comes over the network is not trusted to say which code is run to read it: only numbers, texts, tensors, lists and
the like, and the types listed here. A type is listed where it is defined, by `may_travel`.
"""

from __future__ import annotations

from pathlib import PosixPath
from typing import TypeVar

T = TypeVar("T", bound=type)

TYPES: list[type] = [PosixPath]


def may_travel(kind: T) -> T:
    """List a type whose values ranks send to one another: a plain dataclass, or an error."""
    TYPES.append(kind)
    return kind
