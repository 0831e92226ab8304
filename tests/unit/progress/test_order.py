"""The order of an epoch, the samples of each rank, and their fingerprint."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.config import BatchConfig
from hvd_train.errors import UsageError
from hvd_train.network.models import micro_batch_sizes
from hvd_train.progress.order import (
    BatchLayout,
    EpochOrder,
    Order,
    added,
    assignments,
    choose_layout,
    fingerprint,
    from_bytes,
    in_bytes,
    key,
    resized_layout,
    uniforms,
)


@given(
    num_samples=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6)
)
def test_an_order_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(EpochOrder(seed, epoch, num_samples)[:]), np.arange(num_samples))


def test_orders_and_random_numbers_never_change() -> None:
    """Else a release could neither resume nor audit the runs of an earlier one."""
    assert fingerprint(np.array([0, 1, 41])) == 15690040669863710865
    assert EpochOrder(0, 0, 1000)[:4].tolist() == [292, 415, 131, 714]
    assert EpochOrder(7, 3, 100_003)[:4].tolist() == [85199, 80323, 80088, 7669]
    assert key(1, 2) == 17286951778007540066
    assert uniforms(0, 0, np.array([1]), 2).tolist() == [[0.5145959854125977, 0.9227016568183899]]


@given(num_samples=st.integers(1, 40_000), data=st.data())
def test_a_slice_is_part_of_the_whole(num_samples: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, num_samples + 100))
    for order in (EpochOrder(5, 6, num_samples), Order(num_samples)):
        assert np.array_equal(order[start:stop], order[:][start:stop])
    assert np.array_equal(Order(num_samples)[:], np.arange(num_samples))


@pytest.mark.parametrize(
    ("samples", "batch", "micro", "sizes"),
    [
        (12, 11, 11, [[12]]),
        (11, 5, 2, [[2, 3], [2, 2, 2]]),
        (8, 3, 3, [[3], [3], [2]]),
        (5, 4, 1, [[1] * 4, [1]]),
        (3, 1, 4, [[1]] * 3),
        (1, 4, 2, [[1]]),
    ],
)
def test_a_last_single_sample_joins_others(
    samples: int, batch: int, micro: int, sizes: list[list[int]]
) -> None:
    """Batch norm cannot train on one sample; if each micro-batch has one, nothing changes."""
    layout = BatchLayout(batch, micro)
    for step, expected in zip(assignments(Order(samples), 0, layout, 0, 1), sizes, strict=True):
        assert [len(each.samples) for each in step.micro_batches] == expected
        assert (step.size, step.num_micro_batches) == (sum(expected), len(expected))
    assert {*micro_batch_sizes(layout, samples)} == {size for step in sizes for size in step}


@pytest.mark.parametrize(
    ("global_batch", "sizes"),
    [(1, [1]), (37, [19, 18]), (383, [48] * 7 + [47]), (384, [24] * 16), (1000, [32] * 31 + [8])],
)
def test_a_global_batch_alone_has_the_same_layout_on_any_number_of_ranks(
    global_batch: int, sizes: list[int]
) -> None:
    batch = BatchConfig(global_batch_size=global_batch)
    layout = choose_layout(batch, 1, 10_000)
    assert {choose_layout(batch, size, 10_000) for size in (2, 3, 4, 64)} == {layout}
    (step,) = assignments(Order(global_batch), 0, layout, 0, 1)
    assert [len(micro.samples) for micro in step.micro_batches] == sizes


def test_batch_settings_decide_the_layout_or_are_refused() -> None:
    def layout_of(size, **batch):
        return choose_layout(BatchConfig(**batch), size, 1000)

    with pytest.raises(
        UsageError, match="--accumulation-steps with --global-batch-size needs --batch-size"
    ):
        layout_of(2, global_batch_size=64, accumulation_steps=2)
    with pytest.raises(
        UsageError, match=r"1001 samples is larger than the training set of 1000.*size 1000 or less"
    ):
        layout_of(1, global_batch_size=1001)
    assert layout_of(2, batch_size=8, accumulation_steps=3) == BatchLayout(48, 8)
    assert layout_of(3, global_batch_size=64, batch_size=8) == BatchLayout(64, 8)
    batch = BatchConfig(batch_size=30, accumulation_steps=2)
    assert resized_layout(batch, 3, 190) == BatchLayout(180, 30)
    assert resized_layout(batch, 4, 190) == BatchLayout(190, 30)


@given(samples=st.lists(st.integers(0, 2**40), min_size=1, max_size=20), data=st.data())
def test_other_samples_have_another_fingerprint(samples: list[int], data: st.DataObject) -> None:
    """A missing, repeated or other sample changes it; the order does not."""
    whole = fingerprint(np.array(samples))
    assert fingerprint(np.array(data.draw(st.permutations(samples)))) == whole
    lost, *others = data.draw(st.permutations(samples))
    other = data.draw(st.integers(0, 2**40).filter(lambda number: number != lost))
    for changed in (others, [*samples, lost], [*others, other]):
        assert fingerprint(np.array(changed)) != whole


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_fingerprints_are_summed_over_ranks_in_float32(of_ranks: list[int]) -> None:
    sums = torch.tensor([in_bytes(value) for value in of_ranks]).sum(dim=0)
    assert sums.dtype == torch.float32
    assert from_bytes(sums.tolist()) == added(of_ranks)


def test_fingerprints_of_65_000_ranks_are_exact_in_float32() -> None:
    sums = torch.tensor(in_bytes(2**64 - 1)) * 65_000
    assert from_bytes(sums.tolist()) == (2**64 - 1) * 65_000 % 2**64
