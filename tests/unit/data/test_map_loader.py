"""Batches of a data set that is read item by item, with and without loader processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hvd_train.data.batches import Batch
from hvd_train.data.dataset import Mark, unmarked
from hvd_train.data.map_loader import MapLoader
from hvd_train.data.prepare import Prepare
from hvd_train.errors import UsageError
from hvd_train.progress.order import Cut, EpochOrder, assignments
from tests.support.batches import CPU, PLAIN, PLAIN_DATA, RandomItems, flat

CUT = Cut(8, 3)


def epochs_of(loader: MapLoader, rank: int = 0, size: int = 1, cut: Cut = CUT) -> list[Batch]:
    """Return the batches of a rank in two epochs."""
    work = ((e, assignments(EpochOrder(1, e, 30), 0, cut, rank, size)) for e in range(2))
    return [batch for epoch, part in work for batch in loader.load(epoch, part)]


def test_loader_processes_change_nothing() -> None:
    """Batches with random transforms are the same with 0 and with 2 workers; each epoch has its own random numbers."""
    alone = MapLoader(RandomItems(), PLAIN, CPU, seed=5, num_workers=0)
    others = MapLoader(RandomItems(), PLAIN, CPU, seed=5, num_workers=2)
    others.start()
    try:
        first, second = flat(epochs_of(alone)), flat(epochs_of(others))
    finally:
        others.close()
        alone.close()
    assert torch.equal(first, second)
    by_sample = [half[half[:, 0].argsort()] for half in first.split(30)]
    assert by_sample[0][:, 0].tolist() == list(range(30))
    assert not (by_sample[0][:, 1:] == by_sample[1][:, 1:]).any()


def test_random_transforms_belong_to_the_sample() -> None:
    """An item draws the same numbers in the same epoch, whatever the cut of the batch and the number of ranks."""
    loader = MapLoader(RandomItems(), PLAIN, CPU, seed=5, num_workers=0)
    whole = flat(epochs_of(loader)[:4])
    parts = flat([b for rank in range(3) for b in epochs_of(loader, rank, 3, Cut(10, 2))[:3]])
    assert torch.equal(whole[whole[:, 0].argsort()], parts[parts[:, 0].argsort()])
    other = flat(epochs_of(MapLoader(RandomItems(), PLAIN, CPU, seed=6, num_workers=0))[:4])
    assert not torch.equal(whole[whole[:, 0].argsort()], other[other[:, 0].argsort()])


@pytest.mark.parametrize("processes", [0, 2])
def test_an_epoch_can_begin_in_its_middle_and_be_left_there(processes: int) -> None:
    """Resuming at a cursor gives the rest of the epoch; a loader left in mid-epoch gives the next one in full."""
    loader = MapLoader(RandomItems(), PLAIN, CPU, seed=5, num_workers=processes)
    loader.start()
    order = EpochOrder(1, 0, 30)
    whole = flat(list(loader.load(0, assignments(order, 0, Cut(8, 3), 0, 1))))
    rest = flat(list(loader.load(0, assignments(order, 16, Cut(8, 3), 0, 1))))
    assert torch.equal(rest, whole[16:])
    next(iter(loader.load(0, assignments(order, 0, Cut(8, 3), 0, 1))))
    assert torch.equal(flat(list(loader.load(0, assignments(order, 0, Cut(8, 3), 0, 1)))), whole)
    loader.close()


class WatchedPrepare(Prepare):
    """Notes the size in bytes of the memory that each batch arrives in."""

    def __init__(self) -> None:
        super().__init__(PLAIN_DATA, CPU, image_size=None, augment=None, colour=False)
        self.room: list[int] = []

    def __call__(self, images: Tensor, uniforms: Tensor | None, mark: Mark = unmarked) -> Tensor:
        self.room.append(images.untyped_storage().nbytes())
        return super().__call__(images, uniforms, mark)


def test_batches_come_in_memory_that_is_there() -> None:
    """Batches arrive in lent memory, also the smaller last one of an epoch; larger batches get larger memory."""
    prepare = WatchedPrepare()
    loader = MapLoader(RandomItems(), prepare, CPU, seed=5, num_workers=2)
    loader.start()
    image = torch.empty(1, 2, 2).nbytes
    epochs_of(loader, cut=Cut(8, 4))
    assert set(prepare.room) == {4 * image}, "the last batch has two samples"
    prepare.room.clear()
    epochs_of(loader, cut=Cut(8, 8))
    loader.close()
    assert set(prepare.room) == {8 * image}


def test_a_rank_without_slots_gets_empty_batches() -> None:
    """A rank without slots takes part in each step with nothing to compute."""
    loader = MapLoader(RandomItems(), PLAIN, CPU, seed=5, num_workers=0)
    batches = list(loader.load(0, assignments(EpochOrder(1, 0, 30), 0, Cut(8, 8), 1, 2)))
    assert [(batch.size, batch.num_slots, batch.micro_batches) for batch in batches] == [
        (8, 1, ()), (8, 1, ()), (8, 1, ()), (6, 1, ()),
    ]  # fmt: skip


class Uneven:
    """A map-style data set whose two items have different sizes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, 2 + index, 2), 0


def test_items_that_do_not_fit_together_are_an_error_of_use() -> None:
    """Items of different sizes end in one line instead of a traceback of DataLoader."""
    loader = MapLoader(Uneven(), PLAIN, CPU, seed=0, num_workers=0)
    with pytest.raises(UsageError, match="the items of a batch do not fit together"):
        list(loader.load(0, assignments(EpochOrder(0, 0, 2), 0, Cut(2, 2), 0, 1)))


class FourImages:
    """Four images, each with the colours of a pixel side by side, as decoders leave them, or in planes."""

    def __init__(self, kind: torch.dtype, by_pixel: list[bool]) -> None:
        rows = torch.arange(4 * 5 * 6 * 3).view(4, 5, 6, 3).to(kind).permute(0, 3, 1, 2)
        self._images = [image if kept else image.contiguous() for image, kept in zip(rows, by_pixel, strict=True)]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], index


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("processes", [0, 1])
def test_a_batch_does_not_depend_on_how_its_images_lie(kind: torch.dtype, last: bool, processes: int) -> None:
    """The model gets the same numbers in the same layout, whether colours lie side by side or in planes."""
    inputs = []
    for by_pixel in ([True, True, True, last], [False] * 4):
        loader = MapLoader(FourImages(kind, by_pixel), PLAIN, CPU, seed=0, num_workers=processes)
        (batch,) = loader.load(0, assignments(EpochOrder(0, 0, 4), 0, Cut(4, 4), 0, 1))
        inputs += [micro.inputs for micro in batch.micro_batches]
        loader.close()
    assert torch.equal(inputs[0], inputs[1])
    assert inputs[0].stride() == inputs[1].stride()
