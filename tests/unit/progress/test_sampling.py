"""Samples that are drawn by weight, and samples of similar length in a micro-batch."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from hvd_train.progress.order import (
    UNDECIDED,
    BatchLayout,
    EpochOrder,
    Order,
    Orders,
    assignments,
)
from hvd_train.progress.sampling import BucketOrder, drawn_by

WEIGHTS = np.array([0.0, 1, 2, 0, 3, 4] * 20)
LENGTHS = np.random.default_rng(5).integers(1, 500, 1000).astype(np.float64)
LAYOUT = BatchLayout(64, 12)
DRAWN = drawn_by(WEIGHTS)
BUCKETS = partial(BucketOrder, LENGTHS)


def taken(
    order: Order, cursor: int, ranks: int, layout: BatchLayout = LAYOUT
) -> dict[int, list[int]]:
    """Return the samples of each micro-batch by its place in the epoch, from `cursor` on."""
    begun = cursor // layout.global_batch
    return {
        100 * step + micro.number: micro.samples.tolist()
        for rank in range(ranks)
        for step, batch in enumerate(assignments(order, cursor, layout, rank, ranks), begun)
        for micro in batch.micro_batches
    }


@pytest.mark.parametrize(("orders", "count"), [(DRAWN, 120), (BUCKETS, 1000)])
def test_samples_do_not_depend_on_ranks_or_a_resume(orders: Orders, count: int) -> None:
    """Each micro-batch has the same ones on 1, 2 and 3 ranks and after a resume at a cursor."""
    order = orders(7, 2, count, LAYOUT)
    alone = taken(order, 0, 1)
    rest = {place: samples for place, samples in alone.items() if place >= 100}
    for ranks in (2, 3):
        assert taken(order, 0, ranks) == alone
        assert taken(order, LAYOUT.global_batch, ranks) == rest


def test_these_orders_never_change() -> None:
    """Else a release could neither resume nor audit the runs of an earlier one."""
    assert DRAWN(7, 3, 120, UNDECIDED)[50:56].tolist() == [88, 73, 10, 34, 11, 79]
    assert BUCKETS(7, 3, 1000, LAYOUT)[500:506].tolist() == [635, 540, 469, 566, 584, 297]


def test_frequencies_are_binomial() -> None:
    """No sample is drawn so rarely or so often that the chance of it is below 1e-6.

    For 80 samples that would happen by chance in 1 of 6,000 seeds. A sample of weight 0 is never
    drawn.
    """
    epochs = [DRAWN(3, epoch, len(WEIGHTS), UNDECIDED)[:] for epoch in range(500)]
    counts = np.bincount(np.concatenate(epochs), minlength=len(WEIGHTS))
    draws = 500 * len(WEIGHTS)
    shares = WEIGHTS / WEIGHTS.sum()
    assert not counts[WEIGHTS == 0].any()
    assert binom.cdf(counts, draws, shares).min() > 1e-6
    assert binom.sf(counts - 1, draws, shares)[WEIGHTS > 0].min() > 1e-6
    # two epochs have the same sample at a position with this chance
    chance = float((shares**2).sum())
    equal = int((np.array(epochs[::2]) == np.array(epochs[1::2])).sum())
    assert 1e-6 < binom.cdf(equal, draws // 2, chance) < 1 - 1e-6


@given(
    scale=st.sampled_from([5e-324, 1e-300, 1.0, 1e300, 1.7e308]),
    zeros=st.lists(st.booleans(), min_size=1),
)
def test_weights_of_any_size_draw_only_samples_that_have_one(
    scale: float, zeros: list[bool]
) -> None:
    """Their sum may be beyond the largest number."""
    weights = np.where([*zeros, False], 0.0, scale)
    samples = drawn_by(weights)(1, 0, len(weights), UNDECIDED)[:]
    assert weights[samples].all()


@given(
    count=st.integers(1, 900),
    seed=st.integers(0, 2**63 - 1),
    kinds=st.integers(1, 1000),
    data=st.data(),
)
def test_buckets_hold_each_sample_once(
    count: int, seed: int, kinds: int, data: st.DataObject
) -> None:
    """For batches of any sizes, with remainders, and for equal lengths."""
    batch = data.draw(st.integers(1, count))
    layout = BatchLayout(batch, data.draw(st.integers(1, batch)))
    order = BucketOrder(LENGTHS[:count] % kinds, seed, 3, count, layout)
    assert np.array_equal(np.sort(order[:]), np.arange(count))


@pytest.mark.parametrize("layout", [BatchLayout(256, 32), BatchLayout(100, 16)])
def test_samples_of_a_micro_batch_have_similar_lengths(layout: BatchLayout) -> None:
    """In a window of 100 micro-batches, which are sorted, the differences of the longest and the
    shortest sample add up to the largest length at most. No sample is padded by more than the
    difference in its micro-batch.
    """
    count = 20_000
    lengths = np.random.default_rng(1).integers(1, 1001, count).astype(np.float64)

    def padding(order):
        """Return the padding of each micro-batch."""
        found = taken(order, 0, 1, layout).values()
        return [float((lengths[each].max() - lengths[each]).sum()) for each in found]

    of_buckets = padding(BucketOrder(lengths, 1, 0, count, layout))
    windows = math.ceil(len(of_buckets) / 100)
    assert sum(of_buckets) <= windows * layout.micro_batch * 1000
    assert sum(of_buckets) < 0.05 * sum(padding(EpochOrder(1, 0, count)))


def test_steps_have_short_and_long_micro_batches() -> None:
    """All eight are longer than the middle in 1 of 256 steps: of 250 steps in fewer than eight,
    but for a chance of 1e-5. Another epoch has other micro-batches.
    """
    lengths = np.random.default_rng(1).random(64_000)
    order = BucketOrder(lengths, 1, 0, 64_000, BatchLayout(256, 32))
    means = lengths[order[:]].reshape(250, 8, 32).mean(2)
    assert (means > 0.5).all(1).sum() < 8
    other = BucketOrder(lengths, 1, 1, 64_000, BatchLayout(256, 32))
    assert len(np.intersect1d(order[:32], other[:32])) < 8
