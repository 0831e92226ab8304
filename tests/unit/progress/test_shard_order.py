"""The order of samples in shards."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.progress.order import BatchLayout, assignments, fingerprint
from hvd_train.progress.shard_order import ShardOrder


def starts_of(sizes: list[int]) -> np.ndarray:
    return np.cumsum([0, *sizes])


SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=30).filter(any)


@given(sizes=SIZES, window=st.integers(1, 200), seed=st.integers(0, 2**63 - 1), data=st.data())
def test_each_sample_comes_once(
    sizes: list[int], window: int, seed: int, data: st.DataObject
) -> None:
    """For shards, windows and batches of any sizes, in one stream and in many."""
    starts = starts_of(sizes)
    count = int(starts[-1])
    batch = data.draw(st.integers(1, count))
    layout = BatchLayout(batch, data.draw(st.integers(1, batch)))
    for steps in (BatchLayout(count, count), layout):
        each = ShardOrder(starts, window, seed, 3, count, steps)
        assert np.array_equal(np.sort(each[:]), np.arange(count))
        start = data.draw(st.integers(0, count))
        assert np.array_equal(each[start:], each[:][start:])


def test_orders_of_shards_never_change() -> None:
    """Else a release could not resume the runs of an earlier one."""
    make = partial(ShardOrder, starts_of([100] * 10), 200, 7)
    whole = BatchLayout(1000, 1000)
    small = BatchLayout(64, 16)
    assert make(0, 1000, whole)[500:506].tolist() == [26, 678, 42, 82, 18, 13]
    assert make(0, 1000, small)[500:506].tolist() == [434, 342, 325, 336, 212, 244]
    assert make(1, 1000, whole)[500:506].tolist() == [861, 696, 882, 689, 806, 677]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_read_the_shards_of_their_own_streams(ranks: int) -> None:
    """In an epoch all ranks together read each shard once, or twice if two streams share it."""
    shards = 256
    layout = BatchLayout(256, 32)
    order = ShardOrder(starts_of([100] * shards), 400, 1, 0, 100 * shards, layout)
    reads = 0
    for rank in range(ranks):
        steps = assignments(order, 0, layout, rank, ranks)
        samples = [micro.samples for step in steps for micro in step.micro_batches]
        reads += len(np.unique(np.concatenate(samples) // 100))
    assert reads == shards  # a stream has 32 whole ones


def test_few_shards_are_read_at_a_time() -> None:
    """The samples of a window lie in the shards that it covers."""
    order = ShardOrder(starts_of([100] * 256), 400, 1, 0, 25_600, BatchLayout(256, 32))
    samples = order[:].reshape(-1, 8, 32)  # by step, micro-batch
    for first in range(0, 100, 10):  # 320 samples of a stream, in two windows at most
        shards = [len(np.unique(samples[first : first + 10, k] // 100)) for k in range(8)]
        assert max(shards) <= 2 * 5


def test_windows_are_shuffled_anew_in_each_epoch() -> None:
    """Samples of a micro-batch come from all shards of its window, and shards have new mates."""
    make = partial(ShardOrder, starts_of([100] * 256), 800, 1)
    first, second = (
        make(epoch, 25_600, BatchLayout(256, 32))[:].reshape(-1, 32) for epoch in (0, 1)
    )
    assert np.mean([len(np.unique(row // 100)) for row in first]) > 6
    assert fingerprint(first[0]) != fingerprint(second[0])
    assert len(np.intersect1d(first[:8] // 100, second[:8] // 100)) < 64


def test_a_hundred_million_samples_take_memory_for_their_shards_alone() -> None:
    """Any part of the order is computed by itself."""
    count = 100_000_000
    layout = BatchLayout(4096, 64)
    order = ShardOrder(starts_of([10_000] * 10_000), 10_000, 1, 0, count, layout)
    part = order[count - 5000 :]
    assert len(np.unique(part)) == 5000
    assert 0 <= part.min() <= part.max() < count
