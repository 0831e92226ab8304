"""What a loader process makes of a task."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hvd_train.data.lent_memory import Task
from hvd_train.data.loader_process import TaskReader, Unreadable
from hvd_train.errors import UsageError
from tests.support.batches import RandomItems

ITEM_BYTES = torch.empty(1, 2, 2).nbytes


class Damaged(RandomItems):
    """A map-style data set whose second item cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 1:
            raise UsageError("item 1 is damaged")
        return super().__getitem__(index)


def test_images_lie_in_the_buffer_of_the_task() -> None:
    """A process keeps the buffers that it was sent and fills the one that a later task names."""
    reader = TaskReader(RandomItems(), seed=1)
    buffers = {number: torch.zeros(2 * ITEM_BYTES, dtype=torch.uint8) for number in range(2)}
    first = reader[Task([(0, 3), (0, 4)], 0, buffers)]
    second = reader[Task([(0, 5)], 1, None)]
    alone = TaskReader(RandomItems(), seed=1)[Task([(0, 5)], None, None)]
    assert not isinstance(first, Unreadable)
    assert not isinstance(second, Unreadable)
    assert not isinstance(alone, Unreadable)
    assert (first[2], second[2], alone[2]) == (0, 1, None)
    assert first[0].data_ptr() == buffers[0].data_ptr()
    assert second[0].data_ptr() == buffers[1].data_ptr()
    assert torch.equal(second[0], alone[0])


def test_a_batch_that_does_not_fit_has_memory_of_its_own() -> None:
    """A batch larger than its buffer is whole, and the buffer is still given back under its number."""
    reader = TaskReader(RandomItems(), seed=1)
    buffer = torch.zeros(ITEM_BYTES, dtype=torch.uint8)
    batch = reader[Task([(0, 3), (0, 4)], 0, {0: buffer})]
    assert not isinstance(batch, Unreadable)
    assert (batch[0].shape, batch[2]) == ((2, 1, 2, 2), 0)
    assert not buffer.any()


@pytest.mark.parametrize("buffers", [None, {0: torch.zeros(4 * ITEM_BYTES, dtype=torch.uint8)}], ids=["own", "lent"])
def test_items_of_several_number_formats_are_one_batch_in_a_buffer_too(buffers: dict[int, Tensor] | None) -> None:
    """A folder with one image of 16 bits is read alike in the first batch and in the later ones."""

    class Formats(RandomItems):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return (torch.full((1, 2, 2), 7 + index, dtype=[torch.uint8, torch.float32][index]), index)

    batch = TaskReader(Formats(), seed=1)[Task([(0, 0), (0, 1)], 0, buffers)]
    assert not isinstance(batch, Unreadable), batch.reason
    assert batch[0].dtype == torch.float32
    assert batch[0][:, 0, 0, 0].tolist() == [7.0, 8.0]


def test_an_item_that_cannot_be_read_is_a_value() -> None:
    """A loader process returns the reason, since an exception would arrive with its traceback."""
    reader = TaskReader(Damaged(), seed=1)
    assert reader[Task([(0, 0), (0, 1)], None, None)] == Unreadable("item 1 is damaged")


def test_copies_of_an_item_have_random_numbers_of_their_own() -> None:
    """Sample numbers beyond the end of the data are other draws of the same items."""
    batch = TaskReader(RandomItems(), seed=1)[Task([(0, 2), (0, 32)], None, None)]
    assert not isinstance(batch, Unreadable)
    images, labels, _ = batch
    assert images[:, 0, 0, 0].tolist() == [2, 2]
    assert labels.tolist() == [2, 2]
    assert not (images[0].flatten()[1:] == images[1].flatten()[1:]).any()
