"""Which numbers of the weights each rank of a host updates: shards of equal size, each in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_ALIGNED = 16  # float32 numbers: a line of the cache


@dataclass(frozen=True)
class Part:
    """Some elements of one parameter, in the order in which they lie in memory."""

    parameter: int
    begin: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """Parts of parameters that are updated together."""

    parts: tuple[Part, ...]
    spans: tuple[tuple[int, int], ...]
    """Where they lie among the elements of all parameters, from the first to before the last one."""


class Layout:
    """Where each parameter begins where all lie one behind the other, each at the start of a line of the cache."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` are the numbers of elements of the parameters."""
        self.sizes = tuple(sizes)
        begins = [0]
        for size in sizes:
            begins.append(begins[-1] + -(-size // _ALIGNED) * _ALIGNED)
        self.begins = tuple(begins[:-1])
        self.num_elements = begins[-1]
        """Of all parameters, with the gaps between them."""

    def shards(self, trained: Sequence[int], count: int, most: int) -> list[list[Chunk]]:
        """Return the elements of the parameters `trained` as `count` shards of equal size, in chunks of at most `most`.

        A shard may be empty where there are few elements.
        """
        total = sum(self.sizes[parameter] for parameter in trained)
        bounds = [total * shard // count for shard in range(count + 1)]
        return [
            [
                self._chunk(list(_parts(self.sizes, trained, first, min(first + most, end))))
                for first in range(begin, end, most)
            ]
            for begin, end in pairwise(bounds)
        ]

    def _chunk(self, parts: Sequence[Part]) -> Chunk:
        spans: list[tuple[int, int]] = []
        for part in parts:
            begin, end = (self.begins[part.parameter] + element for element in (part.begin, part.end))
            if spans and begin - spans[-1][1] < _ALIGNED:  # what is between them is a gap, of zeros
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((begin, end))
        return Chunk(tuple(parts), tuple(spans))


def elements_of(shard: Sequence[Chunk]) -> dict[int, tuple[int, int]]:
    """Return for each parameter that a shard has elements of which they are, from the first to before the last one."""
    elements: dict[int, tuple[int, int]] = {}
    for part in (part for chunk in shard for part in chunk.parts):
        first, _ = elements.get(part.parameter, (part.begin, part.end))
        elements[part.parameter] = first, part.end
    return elements


def _parts(sizes: Sequence[int], trained: Sequence[int], begin: int, end: int) -> Iterator[Part]:
    """Yield the elements from `begin` to before `end`, counted through the parameters `trained`."""
    first = 0
    for parameter in trained:
        size = sizes[parameter]
        low, high = max(begin - first, 0), min(end - first, size)
        if low < high:
            yield Part(parameter, low, high)
        first += size
