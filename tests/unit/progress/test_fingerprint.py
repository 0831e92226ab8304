"""The fingerprint of the samples that were taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.progress import fingerprint as fingerprints
from hvd_train.progress.fingerprint import added, fingerprint, from_bytes, in_bytes, of_all
from hvd_train.progress.order import EpochOrder


def test_a_fingerprint_never_changes() -> None:
    """Ledgers of today are audited by the releases of tomorrow."""
    assert fingerprint(np.array([0, 1, 41])) == 15690040669863710865


@given(samples=st.lists(st.integers(0, 2**40), min_size=1, max_size=20), data=st.data())
def test_other_samples_have_another_fingerprint(samples: list[int], data: st.DataObject) -> None:
    """One that is missing, comes twice, or stands for another changes it; their order does not."""
    whole = fingerprint(np.array(samples))
    assert fingerprint(np.array(data.draw(st.permutations(samples)))) == whole
    place = data.draw(st.integers(0, len(samples) - 1))
    other = data.draw(st.integers(0, 2**40).filter(lambda number: number != samples[place]))
    assert fingerprint(np.array([*samples[:place], *samples[place + 1 :]])) != whole
    assert fingerprint(np.array([*samples, samples[place]])) != whole
    assert fingerprint(np.array([*samples[:place], other, *samples[place + 1 :]])) != whole


def test_the_parts_of_an_epoch_add_up_to_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the epoch, and whichever rank takes which part of it."""
    monkeypatch.setattr(fingerprints, "_AT_ONCE", 300)
    order = EpochOrder(3, 1, 1000)
    assert added(fingerprint(order[start : start + 7]) for start in range(0, 1000, 7)) == of_all(1000)
    assert of_all(1000) == fingerprint(np.arange(1000))
    assert of_all(0) == 0


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_it_travels_as_numbers_that_are_summed(of_ranks: list[int]) -> None:
    """In float32, as the sums over the ranks are."""
    sums = torch.tensor([in_bytes(value) for value in of_ranks]).sum(dim=0)
    assert sums.dtype == torch.float32
    assert from_bytes(sums.tolist()) == added(of_ranks)


def test_the_bytes_of_65000_ranks_add_up_without_rounding() -> None:
    """Each partial sum stays below 2^24, up to which float32 has all whole numbers."""
    ranks = 65_000
    assert from_bytes((torch.tensor(in_bytes(2**64 - 1)) * ranks).tolist()) == (2**64 - 1) * ranks % 2**64
