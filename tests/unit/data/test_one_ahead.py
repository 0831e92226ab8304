"""Micro-batches that come to the device one by one."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.batches import MicroBatch, OneAhead
from hvd_train.data.dataset import Arrays
from hvd_train.progress.order import Cut, EpochOrder, assignments
from tests.support.batches import CPU, PLAIN


def test_each_is_begun_when_the_one_before_it_is_used_and_kept_by_its_user_alone() -> None:
    """At most two are there at any time: the one in use, and the next; the first is begun before it is asked for."""
    events: list[str] = []
    alive = weakref.WeakSet[Tensor]()

    def begin(number: int) -> Tensor:
        events.append(f"begin {number}")
        inputs = torch.full((1,), float(number))
        alive.add(inputs)
        return inputs

    def finish(inputs: Tensor) -> MicroBatch:
        number = int(inputs)
        events.append(f"finish {number}")
        return MicroBatch(number, inputs, inputs, np.array([number]))

    coming, counts = OneAhead(map(begin, range(4)), finish), list[int]()
    assert events == ["begin 0"]
    for expected in range(4):
        assert next(coming).number == expected  # nobody keeps it
        counts.append(len(alive))
    assert list(coming) == []
    assert events == ["begin 0", "finish 0", "begin 1", "finish 1", "begin 2", "finish 2", "begin 3", "finish 3"]
    assert counts == [1, 1, 1, 0]
    assert list(OneAhead(map(begin, range(0)), finish)) == []


def test_a_set_in_memory_gives_a_step_its_micro_batches_one_by_one() -> None:
    """However many slots a step has, two of them at most take memory beside the data set; none is left out."""
    loader = ArrayLoader(Arrays(torch.arange(16.0).view(-1, 1, 1, 1), torch.arange(16), 16), PLAIN, CPU, seed=0)
    read: list[str] = []
    loader.watch(read.append)
    taken, samples = list[int](), list[int]()
    for batch in loader.load(0, assignments(EpochOrder(0, 0, 16), 0, Cut(8, 2), 0, 1)):
        taken.append(read.count("read"))
        for micro in batch.micro_batches:
            taken.append(read.count("read"))
            samples += micro.targets.tolist()
        read.clear()
    assert taken == [1, 2, 3, 4, 4] * 2
    assert sorted(samples) == list(range(16))
