"""How samples arrive: in memory, item by item, in other processes, and from folders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from hvd_train.config import DataConfig
from hvd_train.data import loader as loader_module
from hvd_train.data import sources
from hvd_train.data.augment import Augment
from hvd_train.data.dataset import Arrays, DataSet, Mark, unmarked
from hvd_train.data.folder import open_folder
from hvd_train.data.loader import Ahead, ArrayLoader, Batch, MapLoader, Prepare
from hvd_train.errors import UsageError
from hvd_train.progress.order import Cut, EpochOrder, assignments

CPU = torch.device("cpu")
CUT = Cut(8, 3)
PLAIN_DATA = DataSet((), None, ("a",), channels=1)  # type: ignore[arg-type]
PLAIN = Prepare(PLAIN_DATA, CPU, image_size=None, augment=None, colour=False)


class Random:
    """A map-style data set whose items draw from all three generators that transforms use."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor([index, *drawn]).view(1, 2, 2), index % 3


def epochs_of(loader: MapLoader, rank: int = 0, size: int = 1, cut: Cut = CUT) -> list[Batch]:
    """Two epochs of this rank."""
    work = ((e, assignments(EpochOrder(1, e, 30), 0, cut, rank, size)) for e in range(2))
    return [batch for epoch, part in work for batch in loader.load(epoch, part)]


def flat(batches: list[Batch]) -> Tensor:
    """All inputs in the order in which they came."""
    return torch.cat([micro.inputs.flatten(1) for batch in batches for micro in batch.micro_batches])


def test_loader_processes_change_nothing() -> None:
    """With 0 and with 2 workers the same batches, random transforms included; each epoch has its own numbers."""
    alone = MapLoader(Random(), PLAIN, CPU, seed=5, num_workers=0)
    others = MapLoader(Random(), PLAIN, CPU, seed=5, num_workers=2)
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
    """Another cut, another rank: the same item in the same epoch draws the same numbers."""
    loader = MapLoader(Random(), PLAIN, CPU, seed=5, num_workers=0)
    whole = flat(epochs_of(loader)[:4])
    parts = flat([b for rank in range(3) for b in epochs_of(loader, rank, 3, Cut(10, 2))[:3]])
    assert torch.equal(whole[whole[:, 0].argsort()], parts[parts[:, 0].argsort()])
    other = flat(epochs_of(MapLoader(Random(), PLAIN, CPU, seed=6, num_workers=0))[:4])
    assert not torch.equal(whole[whole[:, 0].argsort()], other[other[:, 0].argsort()])


@pytest.mark.parametrize("processes", [0, 2])
def test_an_epoch_can_begin_in_its_middle_and_be_left_there(processes: int) -> None:
    """Resume at a cursor gives the rest of the epoch; a loader left in mid epoch serves the next one whole."""
    loader = MapLoader(Random(), PLAIN, CPU, seed=5, num_workers=processes)
    loader.start()
    order = EpochOrder(1, 0, 30)
    whole = flat(list(loader.load(0, assignments(order, 0, Cut(8, 3), 0, 1))))
    rest = flat(list(loader.load(0, assignments(order, 16, Cut(8, 3), 0, 1))))
    assert torch.equal(rest, whole[16:])
    next(iter(loader.load(0, assignments(order, 0, Cut(8, 3), 0, 1))))
    assert torch.equal(flat(list(loader.load(0, assignments(order, 0, Cut(8, 3), 0, 1)))), whole)
    loader.close()


class Watched(Prepare):
    """Notes how much memory each batch has come in."""

    def __init__(self) -> None:
        super().__init__(PLAIN_DATA, CPU, image_size=None, augment=None, colour=False)
        self.room: list[int] = []

    def __call__(self, images: Tensor, uniforms: Tensor | None, mark: Mark = unmarked) -> Tensor:
        self.room.append(images.untyped_storage().nbytes())
        return super().__call__(images, uniforms, mark)


def test_batches_come_in_memory_that_is_there() -> None:
    """Large and small ones, of a world that has become smaller, too; another size of batch is made room for."""
    prepare = Watched()
    loader = MapLoader(Random(), prepare, CPU, seed=5, num_workers=2)
    loader.start()
    image = torch.empty(1, 2, 2).nbytes
    epochs_of(loader, cut=Cut(8, 4))
    assert set(prepare.room) == {4 * image}, "the last batch has two samples"
    prepare.room.clear()
    epochs_of(loader, cut=Cut(8, 8))
    loader.close()
    assert set(prepare.room) == {8 * image}


def test_a_rank_without_slots_gets_empty_batches() -> None:
    """It takes part in each step with nothing to compute."""
    loader = MapLoader(Random(), PLAIN, CPU, seed=5, num_workers=0)
    batches = list(loader.load(0, assignments(EpochOrder(1, 0, 30), 0, Cut(8, 8), 1, 2)))
    assert [(batch.size, batch.num_slots, batch.micro_batches) for batch in batches] == [
        (8, 1, ()), (8, 1, ()), (8, 1, ()), (6, 1, ()),
    ]  # fmt: skip


class Uneven:
    """Items of different sizes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, 2 + index, 2), 0


def test_a_batch_prepared_ahead_comes_in_its_turn() -> None:
    """Prepared or not, all batches come once and in their order; what is wrong with one is raised in its turn."""

    def batches() -> Iterator[Batch]:
        yield from (Batch(size, 1, ()) for size in (1, 2, 3))
        raise UsageError("cannot read the fourth")

    marks: list[str] = []
    ahead, sizes = Ahead(batches(), marks.append), []
    with pytest.raises(UsageError, match="the fourth"):
        for batch in ahead:
            sizes.append(batch.size)
            if batch.size > 1:
                ahead.prepare()
    assert sizes == [1, 2, 3]
    assert marks == ["data"] * 4
    ended = Ahead(iter([Batch(1, 1, ())]), marks.append)
    assert [(batch.size, ended.prepare()) for batch in ended] == [(1, None)]  # type: ignore[func-returns-value]


def test_items_that_do_not_fit_together_are_an_error_of_use() -> None:
    """One line instead of a traceback of the loader."""
    loader = MapLoader(Uneven(), PLAIN, CPU, seed=0, num_workers=0)
    with pytest.raises(UsageError, match="the items of a batch do not fit together"):
        list(loader.load(0, assignments(EpochOrder(0, 0, 2), 0, Cut(2, 2), 0, 1)))


class Images:
    """The same four images, each with its colours side by side, as decoders leave them, or one after the other."""

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
    """Colours side by side or one after the other: the model gets the same numbers in the same layout."""
    inputs = []
    for by_pixel in ([True, True, True, last], [False] * 4):
        loader = MapLoader(Images(kind, by_pixel), PLAIN, CPU, seed=0, num_workers=processes)
        (batch,) = loader.load(0, assignments(EpochOrder(0, 0, 4), 0, Cut(4, 4), 0, 1))
        inputs.append(batch.micro_batches[0].inputs)
        loader.close()
    assert torch.equal(inputs[0], inputs[1])
    assert inputs[0].stride() == inputs[1].stride()


def test_a_set_in_memory_repeats_its_rows() -> None:
    """`synthetic` has as many samples as asked for, made of fewer images."""
    data = Arrays(torch.arange(3.0).view(3, 1, 1, 1), torch.arange(3), num_samples=7)
    loader = ArrayLoader(data, PLAIN, CPU, seed=0)
    batches = list(loader.load(0, assignments(EpochOrder(0, 0, 7), 0, Cut(7, 7), 0, 1)))
    assert sorted(flat(batches).flatten().tolist()) == [0, 0, 0, 1, 1, 2, 2]
    assert torch.equal(flat(batches).flatten().long(), batches[0].micro_batches[0].targets)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_small_set_prepared_once_gives_what_it_gives_batch_by_batch(
    kind: torch.dtype, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit and in the same layout, for more steps than are looked up at once; the data stay as they were."""
    stored = torch.randint(0, 256, (200, 1, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data = DataSet((), None, ("a",), channels=1, mean=(0.3,), std=(0.7,))  # type: ignore[arg-type]
    arrays = Arrays(stored.to(kind), torch.arange(200), num_samples=200)
    calls = []

    class Counted(Prepare):
        def __call__(self, *arguments: Any, **named: Any) -> Tensor:
            calls.append(arguments)
            return super().__call__(*arguments, **named)

    prepare = Counted(data, CPU, image_size=4, augment=None, colour=True, channels_last=channels_last)

    def batches() -> tuple[list[Batch], int]:
        loader = ArrayLoader(arrays, prepare, CPU, seed=0)
        calls.clear()
        return list(loader.load(1, assignments(EpochOrder(0, 1, 200), 0, Cut(3, 2), 0, 1))), len(calls)

    once, calls_of_once = batches()
    monkeypatch.setattr(loader_module, "_PREPARED", 200 * 3 * 4 * 4 * 4 - 1)
    each, calls_of_each = batches()
    assert (len(once), calls_of_once, calls_of_each) == (67, 0, 133)
    assert torch.equal(arrays.images, stored.to(kind))
    for mine, other in zip(once, each, strict=True):
        for micro, plain in zip(mine.micro_batches, other.micro_batches, strict=True):
            assert torch.equal(micro.inputs, plain.inputs)
            assert torch.equal(micro.targets, plain.targets)
            last = torch.channels_last if channels_last else torch.contiguous_format
            assert micro.inputs.is_contiguous(memory_format=last)


def test_random_changes_belong_to_the_samples_however_many_are_looked_up_at_once() -> None:
    """In memory: a sample of an epoch is changed in the same way in small steps, in large ones, and on two ranks."""
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
    assert changed(Cut(3, 3), 2) == whole  # a rank has no part in any step


def test_drawing_random_numbers_is_counted_with_what_they_are_for() -> None:
    """`hvd-train bench input` shows it under augment, not under read."""
    data = replace(PLAIN_DATA, augment=Augment(1, lambda images, drawn: images))
    prepare = Prepare(data, CPU, image_size=None, augment=data.augment, colour=False)
    loader = ArrayLoader(Arrays(torch.zeros(8, 1, 1, 1), torch.zeros(8), 8), prepare, CPU, seed=0)
    stages: list[str] = []
    loader.watch(stages.append)
    list(loader.load(0, assignments(EpochOrder(0, 0, 8), 0, Cut(8, 8), 0, 1)))
    assert stages == ["augment", "read", "prepare", "augment", "prepare"]


def test_images_are_scaled_resized_normalised_and_coloured_in_this_order() -> None:
    """Bytes become shares of one, then the size, then mean and spread, then three channels."""
    data = DataSet((), None, ("a",), channels=1, mean=(0.5,), std=(0.25,))  # type: ignore[arg-type]
    prepare = Prepare(data, CPU, image_size=4, augment=None, colour=True)
    result = prepare(torch.full((2, 1, 8, 8), 255, dtype=torch.uint8), None)
    assert result.shape == (2, 3, 4, 4)
    assert torch.equal(result, torch.full((2, 3, 4, 4), 2.0))


def picture(path: Path, shade: int, size: tuple[int, int] = (40, 30)) -> None:
    """A real JPEG of one shade."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 255 - shade, 128)).save(path, quality=95)


@pytest.fixture
def folder() -> Path:
    """A data folder with two classes."""
    root = Path("images")
    for split, count in (("train", 3), ("val", 2)):
        for number in range(count):
            picture(root / split / "cat" / f"{number}.jpg", 20 * number)
            picture(root / split / "dog" / f"{number}.jpeg", 200 + number, size=(30, 50))
    return root


def test_class_folders_become_a_data_set(folder: Path) -> None:
    """Classes in the order of their names, images of the size asked for, of any shape and mode."""
    Image.new("L", (25, 25), 77).save(folder / "train" / "cat" / "grey.png")
    Image.new("RGBA", (25, 25), (9, 9, 9, 0)).save(folder / "train" / "dog" / "clear.png")
    data = open_folder(folder, DataConfig(image_size=16))
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.val or ())) == (8, 4)
    for index in range(8):
        image, label = data.train[index]  # type: ignore[index]
        assert (image.shape, image.dtype, label) == ((3, 16, 16), torch.uint8, index // 4)
    first = data.val[0][0]  # type: ignore[index]
    assert abs(first.float().mean(dim=(1, 2)) - torch.tensor([0.0, 255.0, 128.0])).max() < 3


def test_a_folder_without_augmentation_shows_the_middle(folder: Path) -> None:
    """`--augment none`: training images come as those of an evaluation, the same each time."""
    data = open_folder(folder, DataConfig(image_size=16, augment="none"))
    assert torch.equal(data.train[0][0], data.train[0][0])  # type: ignore[index]


def test_an_unreadable_image_is_named(folder: Path) -> None:
    """One line with the file, in the training process and out of a loader process."""
    bad = folder / "train" / "cat" / "1.jpg"
    bad.write_bytes(bad.read_bytes()[:100])
    data = open_folder(folder, DataConfig(image_size=16))
    for workers in (0, 1):
        loader = MapLoader(data.train, PLAIN, CPU, seed=0, num_workers=workers)  # type: ignore[arg-type]
        try:
            with pytest.raises(
                UsageError, match=r"cannot read the image .*cat/1\.jpg: .*; mend or remove it"
            ) as caught:
                list(loader.load(0, assignments(EpochOrder(0, 0, 6), 0, Cut(2, 2), 0, 1)))
            assert "\n" not in str(caught.value)
        finally:
            loader.close()


def remove(path: Path) -> None:
    """A folder with all that is in it."""
    import shutil

    shutil.rmtree(path)


FAULTS = {
    "no folder": (lambda root: remove(root), r"images is not a folder; it must hold train/ and val/"),
    "no val": (lambda root: remove(root / "val"), r"images/val is missing"),
    "no train": (lambda root: remove(root / "train"), r"images/train is missing"),
    "empty train": (lambda root: (remove(root / "train"), (root / "train").mkdir()), r"images/train is empty"),
    "other classes": (lambda root: (root / "val" / "dog").rename(root / "val" / "wolf"), r"only in one: dog, wolf"),
    "empty class": (lambda root: [p.unlink() for p in (root / "train/dog").iterdir()], r"images/train: .*dog"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_used_is_refused(folder: Path, fault: str) -> None:
    """The part that is missing, empty or different is named, in one line."""
    damage, message = FAULTS[fault]
    damage(folder)  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match=message) as caught:
        sources.open_data(DataConfig(data="folder", data_dir=folder), seed=0)
    assert "\n" not in str(caught.value)


def test_digits_are_split_the_same_whatever_the_seed() -> None:
    """1,437 to train on and 360 held out, of ten classes; every run is measured on the same images."""
    first, second = (sources.open_data(DataConfig(data="digits"), seed=seed) for seed in (0, 1))
    assert isinstance(first.val, Arrays)
    assert isinstance(second.val, Arrays)
    assert (len(first.train), len(first.val), len(first.classes)) == (1437, 360, 10)
    assert torch.equal(first.val.images, second.val.images)
    assert isinstance(first.train, Arrays)
    seen = {image.numpy().tobytes() for image in first.train.images}
    assert sum(image.numpy().tobytes() in seen for image in first.val.images) == 0
    values = first.train.images.float() / 255
    assert (values.mean().item(), values.std().item()) == pytest.approx((first.mean[0], first.std[0]), abs=0.002)


def test_an_unknown_data_set_is_answered_with_the_nearest() -> None:
    """`cifar` is `cifar10`."""
    with pytest.raises(UsageError, match="unknown data set 'cifar1'; did you mean 'cifar10'"):
        sources.check_name("cifar1")


def test_cifar_that_is_not_there_says_what_to_type() -> None:
    """Neither a traceback nor a download nobody asked for."""
    with pytest.raises(UsageError, match=r"--data cifar10: not found whole in data .*add --download"):
        sources.open_data(DataConfig(data="cifar10"), seed=0)


def test_own_tensors_are_kept_in_memory() -> None:
    """A pair of TensorDatasets needs no class names: they follow from the labels."""
    images, labels = torch.rand(6, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32)
    data = sources.open_data(DataConfig(), 0, own=lambda config: (TensorDataset(images, labels), None))
    assert isinstance(data.train, Arrays)
    assert data.classes == ("0", "1", "2")
    assert data.train.labels.dtype == torch.int64
    assert data.val is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "it must return"),
        ((None, None), "it must return"),
        ((Random(), None), "needs an attribute `classes`"),
        ((TensorDataset(torch.zeros(0, 1, 2, 2), torch.zeros(0)), None), "there are no training images"),
    ],
)
def test_own_data_of_another_form_are_refused(result: object, message: str) -> None:
    """What the function must return is said in one line."""
    with pytest.raises(UsageError, match=message):
        sources.open_data(DataConfig(), 0, own=lambda config: result)  # type: ignore[arg-type, return-value]
