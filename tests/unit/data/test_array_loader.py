"""Batches of a data set in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_train.data import array_loader
from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.augment import Augment, crop_and_flip
from hvd_train.data.batches import MicroBatch
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.prepare import Prepare
from hvd_train.progress.order import Cut, EpochOrder, assignments
from tests.support.batches import CPU, PLAIN, PLAIN_DATA, flat


def test_a_set_in_memory_repeats_its_rows() -> None:
    """Sample numbers beyond the rows of the set start again at the first row, as `synthetic` has it."""
    data = Arrays(torch.arange(3.0).view(3, 1, 1, 1), torch.arange(3), num_samples=7)
    loader = ArrayLoader(data, PLAIN, CPU, seed=0)
    batches = list(loader.load(0, assignments(EpochOrder(0, 0, 7), 0, Cut(7, 7), 0, 1)))
    (micro,) = batches[0].micro_batches
    assert sorted(micro.inputs.flatten().tolist()) == [0, 0, 0, 1, 1, 2, 2]
    assert torch.equal(micro.inputs.flatten().long(), micro.targets)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_small_set_prepared_once_gives_what_it_gives_batch_by_batch(
    kind: torch.dtype, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways give the same bits in the same layout over many steps, and leave the stored data as they were."""
    stored = torch.randint(0, 256, (200, 1, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data = DataSet((), None, ("a",), channels=1, mean=(0.3,), std=(0.7,))  # type: ignore[arg-type]
    arrays = Arrays(stored.to(kind), torch.arange(200), num_samples=200)
    calls = []

    class Counted(Prepare):
        def __call__(self, *arguments: Any, **named: Any) -> Tensor:
            calls.append(arguments)
            return super().__call__(*arguments, **named)

    prepare = Counted(data, CPU, image_size=4, augment=None, colour=True, channels_last=channels_last)

    def batches() -> tuple[list[list[MicroBatch]], int]:
        loader = ArrayLoader(arrays, prepare, CPU, seed=0)
        calls.clear()
        work = assignments(EpochOrder(0, 1, 200), 0, Cut(3, 2), 0, 1)
        return [list(batch.micro_batches) for batch in loader.load(1, work)], len(calls)

    once, calls_of_once = batches()
    monkeypatch.setattr(array_loader, "_MAX_PREPARED_BYTES", 200 * 3 * 4 * 4 * 4 - 1)
    each, calls_of_each = batches()
    assert (len(once), calls_of_once, calls_of_each) == (67, 0, 133)
    assert torch.equal(arrays.inputs, stored.to(kind))
    for mine, other in zip(once, each, strict=True):
        for micro, plain in zip(mine, other, strict=True):
            assert torch.equal(micro.inputs, plain.inputs)
            assert torch.equal(micro.targets, plain.targets)
            last = torch.channels_last if channels_last else torch.contiguous_format
            assert micro.inputs.is_contiguous(memory_format=last)


def test_random_changes_belong_to_the_samples_however_many_are_looked_up_at_once() -> None:
    """A sample of an epoch is changed in the same way in small steps, in large steps, and on two ranks."""
    data = replace(PLAIN_DATA, augment=Augment(2, lambda images, drawn: images + drawn.sum(1).view(-1, 1, 1, 1)))
    prepare = Prepare(data, CPU, image_size=None, augment=data.augment, colour=False)
    loader = ArrayLoader(Arrays(torch.arange(300.0).view(-1, 1, 1, 1), torch.zeros(300), 300), prepare, CPU, seed=0)

    def changed(cut: Cut, size: int) -> dict[int, float]:
        found = {}
        for rank in range(size):
            for batch in loader.load(1, assignments(EpochOrder(0, 1, 300), 0, cut, rank, size)):
                for micro in batch.micro_batches:
                    found.update(zip(micro.samples.tolist(), micro.inputs.flatten().tolist(), strict=True))
        return found

    whole = changed(Cut(300, 300), 1)
    assert len(whole) == 300
    assert len({value - sample for sample, value in whole.items()}) > 200
    assert changed(Cut(4, 2), 1) == whole
    assert changed(Cut(3, 3), 2) == whole  # one rank has no slot in any step


def test_drawing_random_numbers_is_counted_with_what_they_are_for() -> None:
    """`hvd-train bench input` shows the time to draw random numbers under augment, not under read."""
    data = replace(PLAIN_DATA, augment=Augment(1, lambda images, drawn: images))
    prepare = Prepare(data, CPU, image_size=None, augment=data.augment, colour=False)
    loader = ArrayLoader(Arrays(torch.zeros(8, 1, 1, 1), torch.zeros(8), 8), prepare, CPU, seed=0)
    stages: list[str] = []
    loader.watch(stages.append)
    list(loader.load(0, assignments(EpochOrder(0, 0, 8), 0, Cut(8, 8), 0, 1)))
    assert stages == ["augment", "read", "prepare", "augment", "prepare"]


def test_augmentation_differs_from_epoch_to_epoch() -> None:
    """The same sample of the same set is shifted in another way in the next epoch."""
    prepare = Prepare(PLAIN_DATA, CPU, image_size=None, augment=crop_and_flip(padding=2), colour=False)
    images = torch.arange(16 * 64.0).view(16, 1, 8, 8)
    loader = ArrayLoader(Arrays(images, torch.arange(16), 16), prepare, CPU, seed=0)
    work = list(assignments(EpochOrder(0, 0, 16), 0, Cut(16, 16), 0, 1))
    first, again, next_epoch = (flat(list(loader.load(epoch, work))) for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, next_epoch)
