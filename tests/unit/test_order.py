"""The order of an epoch and its cut."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.config import BatchConfig
from hvd_train.errors import UsageError
from hvd_train.order import Cut, EpochOrder, InSequence, choose_cut, key, uniforms


@given(num_samples=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_an_order_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    """Every sample has exactly one position, whatever the size of the set."""
    assert np.array_equal(np.sort(EpochOrder(seed, epoch, num_samples)[:]), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 16, 17, 2**14, 2**14 + 1, 2**16, 100_003])
def test_an_order_is_a_permutation_at_the_edges(num_samples: int) -> None:
    """Also where the number of samples just fills, or just exceeds, a power of two or a block."""
    assert np.array_equal(np.sort(EpochOrder(0, 0, num_samples)[:]), np.arange(num_samples))


GOLDEN = {
    (0, 0): [292, 415, 131, 714, 922, 279, 580, 46],
    (0, 1): [496, 413, 123, 495, 776, 969, 432, 270],
    (7, 0): [476, 746, 89, 599, 629, 560, 1, 692],
}


@pytest.mark.parametrize(("seed", "epoch"), GOLDEN)
def test_the_order_of_a_seed_and_epoch_never_changes(seed: int, epoch: int) -> None:
    """A release that changed it could not resume the runs of the one before."""
    assert EpochOrder(seed, epoch, 1000)[:8].tolist() == GOLDEN[seed, epoch]


def test_keys_and_uniforms_never_change() -> None:
    """The same for the seeds of dropout and of augmentation."""
    assert [key(0), key(1, 2), key(2, 1)] == [9248179162272254404, 17286951778007540066, 6020280326711147963]
    assert uniforms(0, 0, np.array([0, 1]), 2).tolist() == [
        [0.9686768054962158, 0.16500449180603027],
        [0.5145959854125977, 0.9227016568183899],
    ]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """Two orders agree at about as many positions as chance gives."""
    base = EpochOrder(3, 0, 5000)[:]
    for other in (EpochOrder(3, 1, 5000)[:], EpochOrder(4, 0, 5000)[:]):
        assert (base == other).sum() < 10


def test_positions_are_roughly_uniform() -> None:
    """Over many epochs each sample comes first, middle and last equally often (chi-square, 99.9%)."""
    num_samples, epochs = 12, 3000
    counts = np.zeros((num_samples, num_samples))
    for epoch in range(epochs):
        counts[np.arange(num_samples), EpochOrder(1, epoch, num_samples)[:]] += 1
    expected = epochs / num_samples
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 174  # 11 * 11 degrees of freedom


@given(num_samples=st.integers(1, 40_000), data=st.data())
def test_a_slice_is_part_of_the_whole(num_samples: int, data: st.DataObject) -> None:
    """Any slice, over the borders of blocks and beyond the end, is that part of the whole order."""
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, num_samples + 100))
    assert np.array_equal(EpochOrder(5, 6, num_samples)[start:stop], EpochOrder(5, 6, num_samples)[:][start:stop])


def test_a_slice_of_a_thousand_million_samples_costs_nothing() -> None:
    """The middle of a huge epoch is there at once and in a few megabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    indices = EpochOrder(0, 0, 10**9)[500_000_000:500_000_256]
    assert time.process_time() - start < 1
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 100_000  # KiB; the whole is 8 GB
    assert len(set(indices.tolist())) == 256
    assert indices.min() >= 0
    assert indices.max() < 10**9


@given(
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 1000),
    rows=st.lists(st.integers(0, 2**40), min_size=1, max_size=50),
)
def test_uniforms_belong_to_the_sample(seed: int, epoch: int, rows: list[int]) -> None:
    """They lie in [0, 1) and do not depend on which samples are asked for together."""
    numbers = uniforms(seed, epoch, np.array(rows, dtype=np.int64), 3)
    assert numbers.dtype == np.float32
    assert ((numbers >= 0) & (numbers < 1)).all()
    for position, row in enumerate(rows):
        alone = uniforms(seed, epoch, np.array([row], dtype=np.int64), 3)
        assert np.array_equal(alone[0], numbers[position])


def test_uniforms_are_spread_evenly_and_do_not_hang_together() -> None:
    """Mean, spread and correlation of columns, epochs and neighbouring samples are those of independent numbers."""
    rows = np.arange(20_000, dtype=np.int64)
    first, second = uniforms(0, 0, rows, 2).T
    later = uniforms(0, 1, rows, 1)[:, 0]
    assert abs(first.mean() - 0.5) < 0.01
    assert abs(first.var() - 1 / 12) < 0.003
    for other in (second, later, np.roll(first, 1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.03


def test_in_sequence_is_the_stored_order() -> None:
    """An evaluation goes through the set as it is stored."""
    assert InSequence(5)[1:99].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "size", "cut"),
    [
        ({"batch_size": 8}, 4, Cut(32, 8)),
        ({"batch_size": 8, "accumulation_steps": 3}, 2, Cut(48, 8)),
        ({"global_batch_size": 64}, 4, Cut(64, 16)),
        ({"global_batch_size": 64}, 3, Cut(64, 22)),
        ({"global_batch_size": 64, "accumulation_steps": 2}, 4, Cut(64, 8)),
        ({"global_batch_size": 64, "batch_size": 8}, 3, Cut(64, 8)),
        ({"global_batch_size": 48, "batch_size": 8, "accumulation_steps": 3}, 2, Cut(48, 8)),
    ],
)
def test_the_cut_follows_the_batch_settings(settings: dict[str, int], size: int, cut: Cut) -> None:
    """What is given decides the rest: the global batch, or the micro-batch."""
    assert choose_cut(BatchConfig(**settings), size, 1000) == cut


def test_contradicting_batch_sizes_are_refused_with_the_sum() -> None:
    """The message shows the multiplication that does not come out."""
    batch = BatchConfig(global_batch_size=64, batch_size=8, accumulation_steps=3)
    with pytest.raises(UsageError, match=r"64 is not --batch-size 8 x --accumulation-steps 3 x 2 workers = 48"):
        choose_cut(batch, 2, 1000)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    """It says how large the set is and what to type."""
    with pytest.raises(UsageError, match=r"1001 samples is larger than the training set of 1000.*size 1000 or less"):
        choose_cut(BatchConfig(global_batch_size=1001), 1, 1000)
    assert choose_cut(BatchConfig(global_batch_size=1000), 1, 1000).global_batch == 1000
