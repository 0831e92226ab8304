"""Image files: parts of them are those of the whole, whoever decodes, and nothing is kept."""

from __future__ import annotations

import random
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import v2

from hvd_train.data import pictures
from hvd_train.data.folder import ImageFolder, Middle, RandomCrop
from hvd_train.data.pictures import UNREADABLE, Picture

WAYS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 3},
    "without colour transform": {"keep_rgb": True},
    "optimized": {"optimize": True, "quality": 40},
}


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """An image in which no pixel is like its neighbour; the same for the same size."""
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def encoded(image: Image.Image, kind: str = "jpeg", **options: Any) -> bytes:
    """The bytes of a file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def whole(data: bytes) -> Tensor:
    """All pixels [3, height, width] as Pillow shows them, the right way up."""
    with Image.open(BytesIO(data)) as image:
        return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB"))).permute(2, 0, 1)


def test_this_package_has_its_decoder_of_parts() -> None:
    """Where it was installed with a compiler, as here; without it all is as right, and slower."""
    assert pictures.region_library() is not None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_part_of_a_jpeg_is_that_of_the_whole(way: str, mode: str) -> None:
    """Bit for bit, wherever it lies on the grid of blocks, and it is not all that was decoded."""
    if mode == "L" and way == "without colour transform":
        return
    chance = random.Random(way)
    for width, height in ((1, 1), (7, 90), (16, 16), (129, 65), (200, 150)):
        data = encoded(noise(width, height, mode), **WAYS[way])
        expected, picture = whole(data), Picture(data)
        assert (picture.width, picture.height) == (width, height)
        for _ in range(15):
            wide, high = chance.randint(1, width), chance.randint(1, height)
            left, top = chance.randint(0, width - wide), chance.randint(0, height - high)
            part = picture.part(left, top, wide, high)
            assert torch.equal(part, expected[:, top : top + high, left : left + wide]), (left, top, wide, high)
        assert picture._whole is None


@pytest.mark.parametrize("compiled", [True, False])
def test_random_crops_are_those_of_torchvision(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same random numbers the same image, bit for bit, of any shape: so the distribution is the same."""
    if not compiled:
        monkeypatch.setattr(pictures, "region_library", lambda: None)
    usual = v2.Compose([v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip()])
    ours = RandomCrop(24)
    for width, height in ((500, 375), (33, 47), (300, 20), (9, 120)):  # the last two: no part fits, the middle is taken
        data = encoded(noise(width, height), quality=90)
        picture, expected = Picture(data), whole(data)
        for seed in range(25):
            torch.manual_seed(seed)
            found = ours(picture)
            torch.manual_seed(seed)
            assert torch.equal(found, usual(expected)), (width, height, seed)


def test_the_middle_is_that_of_torchvision() -> None:
    """Evaluation sees what Resize and CenterCrop make of the whole image."""
    data = encoded(noise(250, 190))
    usual = v2.Compose([v2.Resize(64, antialias=True), v2.CenterCrop(56)])
    assert torch.equal(Middle(64, 56)(Picture(data)), usual(whole(data)))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGB", "png"), ("L", "png"), ("P", "png"), ("RGBA", "png"), ("1", "png"), ("CMYK", "jpeg"), ("RGB", "webp")],
)
def test_other_formats_come_as_pillow_shows_them(mode: str, kind: str) -> None:
    """In red, green and blue."""
    data = encoded(noise(30, 20, mode), kind)
    assert torch.equal(Picture(data).part(3, 4, 20, 10), whole(data)[:, 4:14, 3:23])


def test_sixteen_bits_become_the_upper_eight() -> None:
    """Pillow's conversion alone would show all but the darkest of these as white."""
    values = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    part = Picture(encoded(Image.fromarray(values), "png")).part(0, 0, 16, 16)
    assert torch.equal(part[1].flatten(), torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_image_is_set_upright(orientation: int) -> None:
    """As its Exif data say; a camera that was held upright says so, too, and costs no speed."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(40, 24), exif=exif)
    picture, expected = Picture(data), whole(data)
    assert (picture.height, picture.width) == tuple(expected.shape[1:])
    assert torch.equal(picture.part(5, 2, 15, 20), expected[:, 2:22, 5:20])
    assert (picture._whole is None) == (orientation == 1)


def test_a_file_that_was_cut_off_is_unreadable() -> None:
    """Wherever it was cut, even where all that is looked at was still there."""
    data = encoded(noise(64, 64), quality=90)
    for length in range(0, len(data), 97):
        with pytest.raises(UNREADABLE):
            Picture(data[:length]).part(0, 0, 8, 1)


def test_a_damaged_file_is_unreadable_or_as_pillow_shows_it() -> None:
    """Bytes changed anywhere: no crash, no exit of the process, and no pixels of our own invention."""
    chance, sound = random.Random(1), encoded(noise(48, 40), quality=80)
    same = 0
    for _ in range(400):
        data = bytearray(sound)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(2, len(data) - 2)] = chance.randrange(256)
        try:
            expected = whole(bytes(data))
        except UNREADABLE:
            expected = None
        try:
            picture = Picture(bytes(data))
            wide, high = picture.width // 2, picture.height // 2
            part = picture.part(wide // 2, high // 2, wide, high)
        except UNREADABLE:
            assert expected is None
            continue
        if expected is not None:
            assert torch.equal(part, expected[:, high // 2 :, wide // 2 :][:, :high, :wide])
            same += 1
    assert same > 100


@pytest.fixture
def many() -> Path:
    """A class folder with 60 names for one photograph of 1500 x 1000 pixels, 4.5 MB when decoded."""
    root = Path("many")
    (root / "a").mkdir(parents=True)
    (root / "a" / "00.jpg").write_bytes(encoded(noise(1500, 1000), quality=60))
    for number in range(1, 60):
        (root / "a" / f"{number:02}.jpg").hardlink_to(root / "a" / "00.jpg")
    return root


def test_a_data_set_is_never_in_memory(many: Path) -> None:
    """After all files were read, 270 MB of pixels, the process has not grown by a tenth of that."""
    images = ImageFolder(many, ["a"], RandomCrop(32))
    images[0]
    before = psutil.Process().memory_info().rss
    for number in range(len(images)):
        images[number]
    assert psutil.Process().memory_info().rss - before < 27e6


def test_loader_processes_share_the_list_of_files(many: Path) -> None:
    """What is sent to each of them does not grow with the number of files, so neither do their copies."""
    few = ImageFolder(many, ["a"], RandomCrop(32))
    for number in range(60, 260):
        (many / "a" / f"with a long name {number:03}.jpg").hardlink_to(many / "a" / "00.jpg")
    more = ImageFolder(many, ["a"], RandomCrop(32))
    assert (len(few), len(more)) == (60, 260)
    assert few.path(7) == more.path(7) == many / "a" / "07.jpg"
    assert abs(len(ForkingPickler.dumps(more)) - len(ForkingPickler.dumps(few))) < 100
