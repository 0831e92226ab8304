"""A sequence that stays short however much comes: neighbours are joined, the last values stay as they came."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")
_AS_THEY_CAME = 10
_MOST = 2048


class Condensed(Generic[T]):
    """Values in the order in which they came; from twice `most` on, each stands for as many that were neighbours."""

    def __init__(self, join: Callable[[T, T], T], most: int = _MOST) -> None:
        """Begin without values; `join` makes one of two neighbours."""
        self._join, self._most = join, most
        self._joined: list[T] = []
        self._each = 1  # how many values one of them stands for, a power of two
        self._last: list[T] = []

    def append(self, value: T) -> None:
        """Take the next value."""
        self._last.append(value)
        if len(self._last) < self._each + _AS_THEY_CAME:
            return
        self._joined.append(self._one_of(self._last[: self._each]))
        del self._last[: self._each]
        if len(self._joined) == 2 * self._most:
            self._joined = self._in_pairs(self._joined)
            self._each *= 2

    def values(self) -> tuple[T, ...]:
        """Return the values; the last ten are as they came."""
        waiting = self._last[:-_AS_THEY_CAME]
        return (*self._joined, *([self._one_of(waiting)] if waiting else []), *self._last[-_AS_THEY_CAME:])

    def _one_of(self, values: list[T]) -> T:
        while len(values) > 1:
            values = self._in_pairs(values)
        return values[0]

    def _in_pairs(self, values: list[T]) -> list[T]:
        pairs = [self._join(one, other) for one, other in zip(values[::2], values[1::2], strict=False)]
        return [*pairs, values[-1]] if len(values) % 2 else pairs


def condensed(values: Iterable[T], join: Callable[[T, T], T], most: int) -> tuple[T, ...]:
    """Return these values, or where they are more than twice `most`, about that many that stand for them."""
    short = Condensed(join, most)
    for value in values:
        short.append(value)
    return short.values()
