"""What a data set is."""

from __future__ import annotations

import torch

from hvd_train.data.dataset import Arrays, Staged
from hvd_train.data.transforms import Items
from tests.support.batches import RandomItems


def test_a_set_in_memory_may_have_more_samples_than_rows() -> None:
    """The length is the number of samples, since rows may repeat."""
    assert len(Arrays(torch.zeros(3, 1, 2, 2), torch.zeros(3), num_samples=7)) == 7


def test_a_data_set_of_the_user_needs_no_stages() -> None:
    """Only data sets that report the stages of reading an item are asked for them."""
    assert not isinstance(RandomItems(), Staged)
    assert isinstance(Items(Arrays(torch.zeros(3, 1, 2, 2), torch.zeros(3), 3), None), Staged)
