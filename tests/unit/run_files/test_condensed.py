"""A sequence that stays short: what is kept, and of what it stands for."""

from __future__ import annotations

import pytest

from hvd_train.run_files.condensed import Condensed, condensed

Range = tuple[int, int]
"""The first and the last of some neighbours."""


def together(one: Range, other: Range) -> Range:
    """The neighbours of both; they must be neighbours themselves."""
    assert one[1] + 1 == other[0]
    return one[0], other[1]


@pytest.mark.parametrize("count", [0, 1, 10, 11, 16, 17, 18, 19, 25, 26, 100, 1000, 12345])
def test_every_value_is_in_one_of_a_few(count: int) -> None:
    """None is lost or counted twice, there are never more than some, and the last ten are as they came."""
    values = Condensed(together, most=8)
    for number in range(count):
        values.append((number, number))
        assert len(values.values()) <= 2 * 8 + 1 + 10
    kept = values.values()
    assert [one[1] + 1 for one in kept[:-1]] == [other[0] for other in kept[1:]]
    assert (kept[0][0], kept[-1][1]) == (0, count - 1) if count else not kept
    assert kept[-10:] == tuple((number, number) for number in range(max(0, count - 10), count))
    sizes = {last - first + 1 for first, last in kept[:-11]}
    assert len(sizes) <= 1, "each stands for as many"


def test_few_values_stay_as_they_are() -> None:
    """Up to twice the number wanted, and ten more."""
    values = [(number, number) for number in range(25)]
    assert condensed(values, together, most=8) == tuple(values)
