"""Shared memory that is lent to loader processes."""

from __future__ import annotations

import itertools

import numpy as np

from hvd_train.data.lent_memory import BATCHES_PER_PROCESS, Tasks
from hvd_train.progress.order import Slot


def slots(count: int) -> list[Slot]:
    """Return slots of two samples each."""
    return [Slot(number, np.array([2 * number, 2 * number + 1])) for number in range(count)]


def test_a_task_names_its_samples_with_their_epoch() -> None:
    """Loader processes get the samples of one slot each, in the order of the slots."""
    tasks = Tasks(num_workers=0)
    tasks.epoch, tasks.slots = 3, slots(2)
    assert [task.samples for task in tasks] == [[(3, 0), (3, 1)], [(3, 2), (3, 3)]]


def test_a_buffer_is_lent_to_one_task_at_a_time() -> None:
    """A buffer is lent again only after it was given back; without a free one a batch gets memory of its own."""
    tasks = Tasks(num_workers=1)
    tasks.allocate(100)
    tasks.slots = slots(9)
    iterator = iter(tasks)
    lent = [task.buffer for task in itertools.islice(iterator, BATCHES_PER_PROCESS + 1)]
    assert len(set(lent)) == BATCHES_PER_PROCESS + 1
    assert None not in lent
    assert next(iterator).buffer is None
    tasks.give_back(None)
    tasks.give_back(lent[1])
    assert [next(iterator).buffer, next(iterator).buffer] == [lent[1], None]


def test_an_epoch_that_was_left_has_lent_nothing() -> None:
    """Buffers that were not given back before an epoch was left are free in the next one."""
    tasks = Tasks(num_workers=1)
    tasks.allocate(100)
    for _ in range(2):
        tasks.slots = slots(BATCHES_PER_PROCESS + 1)
        assert None not in [task.buffer for task in tasks]


def test_each_process_hears_of_new_buffers_once() -> None:
    """The first tasks of an epoch, one for each process, carry all buffers; larger ones are sent anew."""
    tasks = Tasks(num_workers=2)
    for nbytes, expected in ((100, [True, True, False]), (80, [False] * 3), (200, [True, True, False])):
        tasks.allocate(nbytes)
        tasks.slots = slots(3)
        sent = [task.buffers for task in tasks]
        assert [buffers is not None for buffers in sent] == expected
        for buffers in sent:
            assert buffers is None or {buffer.numel() for buffer in buffers.values()} == {nbytes}


def test_without_loader_processes_nothing_is_lent() -> None:
    """Batches that this process reads itself need no shared memory."""
    tasks = Tasks(num_workers=0)
    tasks.allocate(100)
    tasks.slots = slots(1)
    assert [(task.buffer, task.buffers) for task in tasks] == [(None, None)]
