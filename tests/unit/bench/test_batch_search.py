"""Which batch is measured next, and what follows from those that were."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvd_train.bench.batch_search import (
    Row,
    fastest,
    granularity,
    has_fallen,
    large_enough,
    next_size,
    share,
    smallest_failed,
    to_type,
)


def searched(fits: Callable[[int], bool], first: int = 2, last: int = 8192) -> list[Row]:
    """Return the rows of a whole search, in which speeds grow with the size."""
    rows: list[Row] = []
    while (size := next_size(rows, first, last)) is not None:
        assert size not in [row.batch_size for row in rows], "no size is measured twice"
        rows.append(Row(size, float(size)) if fits(size) else Row(size, failed="out of memory"))
    return rows


def of(*speeds: tuple[int, float]) -> list[Row]:
    """Return rows of these sizes and speeds."""
    return [Row(size, speed) for size, speed in speeds]


def test_sizes_grow_by_two_up_to_the_last() -> None:
    """The last one is measured itself, also where it is no double of the one before."""
    assert [row.batch_size for row in searched(lambda size: True, 2, 50)] == [2, 4, 8, 16, 32, 50]
    assert [row.batch_size for row in searched(lambda size: True, 7, 7)] == [7]


@pytest.mark.parametrize("most", range(1, 600))
def test_the_largest_size_that_fits_is_found(most: int) -> None:
    """To an eighth of it, from both sides, in at most three sizes more than the doubling took."""
    rows = searched(lambda size: size <= most)
    largest = max(row.batch_size for row in rows if row.failed is None)
    too_large = smallest_failed(rows)
    assert too_large is not None
    assert largest <= most < too_large
    assert too_large - largest <= granularity(largest) <= max(1, largest / 8)
    assert len(rows) <= max(2, most).bit_length() + 4


def test_sizes_between_are_multiples_of_a_power_of_two() -> None:
    """Where 64 fits and 128 does not, multiples of 8 are tried, which GPUs like."""
    assert [row.batch_size for row in searched(lambda size: size <= 100, 16)] == [16, 32, 64, 128, 96, 112, 104]


def test_where_the_first_does_not_fit_smaller_ones_are_tried() -> None:
    """Down to a single sample; where that does not fit, the search is over."""
    assert [row.batch_size for row in searched(lambda size: size <= 3, 32)] == [32, 16, 8, 4, 2, 3]
    assert [row.batch_size for row in searched(lambda size: False, 8)] == [8, 4, 2, 1]


def test_a_speed_that_falls_ends_the_search() -> None:
    """Two clearly slower sizes do, a single one does not: it may be chance."""
    rising = of((2, 50.0), (4, 90.0), (8, 100.0))
    assert not has_fallen(rising)
    assert next_size([*rising, *of((16, 80.0))], 2, 64) == 32
    assert next_size([*rising, *of((16, 80.0), (32, 95.0))], 2, 64) == 64
    fallen = [*rising, *of((16, 80.0), (32, 70.0))]
    assert has_fallen(fallen)
    assert next_size(fallen, 2, 64) is None


def test_the_smallest_size_that_is_about_as_fast_is_large_enough() -> None:
    """Within 3% of the fastest; sizes that failed have no speed."""
    rows = [*of((8, 50.0), (16, 96.9), (32, 97.1), (64, 100.0), (128, 99.0)), Row(256, failed="out of memory")]
    assert (fastest(rows), large_enough(rows)) == (64, 32)
    assert share(rows, 8) == 0.5


@pytest.mark.parametrize(
    ("total", "ranks", "says"),
    [
        (128, 2, ["type --batch-size 64: the global batch is that of the recipe, 128"]),
        (512, 2, ["--batch-size 64: the global batch is 128 then", "or --batch-size 64 --accumulation-steps 4, which"]),
        (
            100,
            2,
            ["--batch-size 64: the global batch is 128 then", "or --global-batch-size 100 --batch-size 50, which"],
        ),
        (
            200,
            2,
            ["--batch-size 64: the global batch is 128 then", "or --global-batch-size 200 --batch-size 64, which"],
        ),
    ],
)
def test_what_to_type(total: int, ranks: int, says: list[str]) -> None:
    """The batch, and the line that keeps the recipe's global batch: by accumulation where it is a multiple."""
    lines = to_type(64, total, ranks)
    assert len(lines) == len(says)
    assert all(words in line for words, line in zip(says, lines, strict=True)), lines
