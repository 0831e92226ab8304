"""Class folders of image files as data sets."""

from __future__ import annotations

import os
import shutil
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from hvd_train.data import sources
from hvd_train.data.encoded import Look
from hvd_train.data.folder import ImageFolder, open_folder
from hvd_train.data.map_loader import MapLoader
from hvd_train.data.views import RandomCrop
from hvd_train.errors import UsageError
from hvd_train.progress.order import Cut, EpochOrder, assignments
from hvd_train.settings.data import DataConfig
from tests.support.batches import CPU, PLAIN
from tests.support.bombs import BOMBS
from tests.support.jpegs import encoded, noise


def picture(path: Path, shade: int, size: tuple[int, int] = (40, 30)) -> None:
    """Write a JPEG file of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 255 - shade, 128)).save(path, quality=95)


@pytest.fixture
def folder() -> Path:
    """Return a data folder with two classes."""
    root = Path("images")
    for split, count in (("train", 3), ("val", 2)):
        for number in range(count):
            picture(root / split / "cat" / f"{number}.jpg", 20 * number)
            picture(root / split / "dog" / f"{number}.jpeg", 200 + number, size=(30, 50))
    return root


def test_class_folders_become_a_data_set(folder: Path) -> None:
    """Classes are in the order of their names; files of any shape and mode become images of the requested size."""
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
    """With `--augment none`, training images are the same each time, as those of an evaluation are."""
    data = open_folder(folder, DataConfig(image_size=16, augment="none"))
    assert torch.equal(data.train[0][0], data.train[0][0])  # type: ignore[index]


def test_an_unreadable_image_is_named(folder: Path) -> None:
    """The error is one line with the file, whether the training process or a loader process reads it."""
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


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_an_image_is_named(folder: Path) -> None:
    """It is not waited for."""
    pipe = folder / "val" / "cat" / "1.jpg"
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=rf"cannot read the image {pipe}: .*it is no file, but a pipe or a device"):
        open_folder(folder, DataConfig(image_size=16)).val[1]  # type: ignore[index]


def test_an_image_of_too_many_pixels_is_named(folder: Path) -> None:
    """The error is one line with the file, the flag and what to do; a greater limit lets the file in."""
    bomb = folder / "val" / "cat" / "1.jpg"
    bomb.write_bytes(BOMBS["jpeg"](12_000))
    with pytest.raises(UsageError) as caught:
        open_folder(folder, DataConfig(image_size=16)).val[1]  # type: ignore[index]
    assert str(caught.value) == (
        f"cannot read the image {bomb}: it has more pixels than --max-image-pixels 90000000 allows; mend or remove it"
    )
    shutil.copytree(folder / "train", folder / "test")
    for split in ("train", "val", "test"):
        with pytest.raises(UsageError, match="--max-image-pixels 1199 allows"):
            getattr(open_folder(folder, DataConfig(image_size=16, max_image_pixels=1199)), split)[0]
        getattr(open_folder(folder, DataConfig(image_size=16, max_image_pixels=1200)), split)[0]


def remove(path: Path) -> None:
    """Remove a folder with everything in it."""
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
    """One line names the part that is missing, empty or different."""
    damage, message = FAULTS[fault]
    damage(folder)  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match=message) as caught:
        sources.open_data(DataConfig(data="folder", data_dir=folder), seed=0)
    assert "\n" not in str(caught.value)


@pytest.fixture
def many() -> Path:
    """Return a class folder with 60 names for one image of 1500 x 1000 pixels, 4.5 MB when decoded."""
    root = Path("many")
    (root / "a").mkdir(parents=True)
    (root / "a" / "00.jpg").write_bytes(encoded(noise(1500, 1000), quality=60))
    for number in range(1, 60):
        (root / "a" / f"{number:02}.jpg").hardlink_to(root / "a" / "00.jpg")
    return root


def test_a_data_set_is_never_in_memory(many: Path) -> None:
    """Reading all files, 270 MB of pixels, makes the process grow by less than a tenth of that."""
    images = ImageFolder(many, ["a"], Look(RandomCrop(32)))
    images[0]
    before = psutil.Process().memory_info().rss
    for number in range(len(images)):
        images[number]
    assert psutil.Process().memory_info().rss - before < 27e6


def test_loader_processes_share_the_list_of_files(many: Path) -> None:
    """What is sent to a loader process does not grow with the number of files."""
    few = ImageFolder(many, ["a"], Look(RandomCrop(32)))
    for number in range(60, 260):
        (many / "a" / f"with a long name {number:03}.jpg").hardlink_to(many / "a" / "00.jpg")
    more = ImageFolder(many, ["a"], Look(RandomCrop(32)))
    assert (len(few), len(more)) == (60, 260)
    assert few.path(7) == more.path(7) == many / "a" / "07.jpg"
    assert abs(len(ForkingPickler.dumps(more)) - len(ForkingPickler.dumps(few))) < 100
