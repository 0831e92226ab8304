"""The order of samples in shards."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.progress.order import BatchLayout, assignments
from hvd_train.progress.shard_order import ShardOrder


def starts_of(sizes: list[int]) -> np.ndarray:
    return np.cumsum([0, *sizes])


STARTS = starts_of([100] * 256)
LAYOUT = BatchLayout(256, 32)
ORDER = ShardOrder(STARTS, 400, 1, 0, 25_600, LAYOUT)
SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=30).filter(any)


@given(sizes=SIZES, window=st.integers(1, 200), seed=st.integers(0, 2**63 - 1), data=st.data())
def test_each_sample_comes_once(
    sizes: list[int], window: int, seed: int, data: st.DataObject
) -> None:
    """For shards, windows and batches of any sizes, in one stream and in many."""
    count = sum(sizes)
    batch = data.draw(st.integers(1, count))
    start = data.draw(st.integers(0, count))
    many = BatchLayout(batch, data.draw(st.integers(1, batch)))
    for layout in (BatchLayout(count, count), many):
        order = ShardOrder(starts_of(sizes), window, seed, 3, count, layout)
        assert np.array_equal(np.sort(order[:]), np.arange(count))
        assert np.array_equal(order[start:], order[:][start:])


def test_orders_of_shards_never_change() -> None:
    """Else a release could not resume the runs of an earlier one."""
    make = partial(ShardOrder, starts_of([100] * 10), 200, 7)
    assert make(0, 1000, BatchLayout(64, 16))[500:506].tolist() == [434, 342, 325, 336, 212, 244]
    assert make(1, 1000, BatchLayout(1000, 1000))[500:503].tolist() == [861, 696, 882]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_read_the_shards_of_their_own_streams(ranks: int) -> None:
    """In an epoch all ranks together read each shard once, or twice if two streams share it."""
    reads = 0
    for rank in range(ranks):
        steps = assignments(ORDER, 0, LAYOUT, rank, ranks)
        samples = [micro.samples for step in steps for micro in step.micro_batches]
        reads += len(np.unique(np.concatenate(samples) // 100))
    assert reads == 256  # a stream has 32 whole ones


def test_few_shards_are_read_at_a_time() -> None:
    """The samples of a window lie in the shards that it covers."""
    samples = ORDER[:].reshape(10, 10, 8, 32)  # by ten steps, step, micro-batch
    for ten in samples:  # 320 samples of a stream, in two windows at most
        assert max(len(np.unique(ten[:, stream] // 100)) for stream in range(8)) <= 2 * 5


def test_windows_are_shuffled_anew_in_each_epoch() -> None:
    """Samples of a micro-batch come from all shards of its window, and shards have new mates."""
    first, second = (
        ShardOrder(STARTS, 800, 1, epoch, 25_600, LAYOUT)[:].reshape(-1, 32) for epoch in (0, 1)
    )
    assert np.mean([len(np.unique(row // 100)) for row in first]) > 6
    assert len(np.intersect1d(first[0], second[0])) < 32
    assert len(np.intersect1d(first[:8] // 100, second[:8] // 100)) < 64


def test_a_hundred_million_samples_take_memory_for_their_shards_alone() -> None:
    """Any part of the order is computed by itself."""
    count = 100_000_000
    layout = BatchLayout(4096, 64)
    order = ShardOrder(starts_of([10_000] * 10_000), 10_000, 1, 0, count, layout)
    part = order[count - 5000 :]
    assert len(np.unique(part)) == 5000
    assert 0 <= part.min() <= part.max() < count
