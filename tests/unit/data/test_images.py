"""Image files, and class folders as data sets."""

import json
import os
import random
import re
import shutil
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import EpsImagePlugin, Image
from torchvision.transforms import v2

from hvd_train.data import identity, sources
from hvd_train.data.dataset import DataSet
from hvd_train.data.folder import UNREADABLE, CenterCrop, ImageFolder, RandomCrop, decode, open_folder
from hvd_train.data.loader import MapLoader
from hvd_train.errors import UsageError
from hvd_train.progress.order import BatchLayout, EpochOrder, assignments
from hvd_train.settings.data import DataConfig
from tests.support.batches import CPU, PLAIN
from tests.support.bombs import BOMBS, peak_growth
from tests.support.jpegs import encoded, noise, whole

WAYS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 3},
    "without colour transform": {"keep_rgb": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_jpeg_has_the_pixels_of_pillow(way: str) -> None:
    for mode in ("RGB", "L") if way != "without colour transform" else ("RGB",):
        for width, height in ((1, 1), (7, 90), (129, 65), (200, 150)):
            data = encoded(noise(width, height, mode), **WAYS[way])
            assert torch.equal(decode(data), whole(data)), (mode, width, height)


def test_a_damaged_jpeg_is_refused_or_has_the_pixels_of_pillow() -> None:
    chance, sound = random.Random(1), encoded(noise(48, 40), quality=80)
    same = 0
    for _ in range(300):
        changed = bytearray(sound)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(2, len(changed) - 2)] = chance.randrange(256)
        try:
            expected = whole(bytes(changed))
        except (*UNREADABLE, Image.DecompressionBombError):
            with pytest.raises(UNREADABLE):
                decode(bytes(changed))
            continue
        assert torch.equal(decode(bytes(changed)), expected)
        same += 1
    assert same > 80
    for length in range(0, len(sound), 97):
        with pytest.raises(UNREADABLE):
            decode(sound[:length])


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "png"), ("P", "png"), ("RGBA", "png"), ("1", "png"), ("CMYK", "jpeg"), ("RGB", "webp")]
)
def test_other_formats_come_as_pillow_shows_them(mode: str, kind: str) -> None:
    data = encoded(noise(30, 20, mode), kind)
    assert torch.equal(decode(data), whole(data))


GREY = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)


def test_sixteen_bits_are_scaled_in_every_format() -> None:
    """Pillow's conversion alone would make all but the darkest values white."""
    png, *others = (encoded(Image.fromarray(GREY), kind) for kind in ("png", "tiff", "ppm"))
    assert torch.equal(decode(png)[1].flatten(), torch.arange(256, dtype=torch.uint8))
    for data in (*others, b"P5 16 16 4095\n" + (GREY >> 4).astype(">u2").tobytes()):
        assert (decode(data)[1].flatten().int() - torch.arange(256)).abs().max() <= 1


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_grey_values_without_a_known_range_are_refused(dtype: Any) -> None:
    """Pillow would clip them to 0 and 255."""
    image = Image.fromarray(GREY.astype(dtype))
    with pytest.raises(UNREADABLE, match=f"mode {image.mode}, .*no known range"):
        decode(encoded(image, "tiff"))


def test_odd_exif_data_give_no_warning() -> None:
    data = encoded(noise(40, 24), exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x02\0")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        whole(data)
        assert seen, "Pillow alone warns"
        seen.clear()
        decode(data)
    assert not seen


def test_a_turned_image_is_set_upright() -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(noise(40, 24), exif=exif)
        assert torch.equal(decode(data), whole(data)), orientation


def test_other_formats_are_refused_and_run_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content decides about the format; PostScript starts no Ghostscript."""
    (tmp_path / "gs").write_text("#!/bin/sh\ntouch started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for kind in ("eps", "gif", "tga", "ico", "dds", "jpeg2000"):
        with pytest.raises(UNREADABLE, match="none of JPEG, PNG, PPM, BMP, TIFF, WEBP"):
            decode(encoded(noise(16, 16), kind))
    assert not Path("started").exists()


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_file_that_claims_many_pixels_takes_no_memory(kind: str) -> None:
    for side in (10_000, 65_000):
        data = BOMBS[kind](side)
        assert len(data) < 1000

        def look(data: bytes = data) -> None:
            with pytest.raises(UNREADABLE, match="more pixels than --max-image-pixels 90000000 allows"):
                decode(data)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert peak_growth(look) < 16e6


def test_the_limit_is_the_largest_image_that_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's own limit neither warns nor changes for other code."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for kind in BOMBS:
        data = encoded(noise(30, 20), kind)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert decode(data, max_pixels=600).shape == (3, 20, 30)
        with pytest.raises(UNREADABLE, match="--max-image-pixels 599"):
            decode(data, max_pixels=599)
    assert Image.MAX_IMAGE_PIXELS == 100


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [("CMYK", "jpeg", {"progressive": True, "subsampling": 0}), ("RGBA", "webp", {"lossless": True})],
)
def test_decoding_takes_memory_in_proportion_to_the_pixels(mode: str, kind: str, options: dict[str, Any]) -> None:
    side = 2000
    data = encoded(Image.new(mode, (side, side)), kind, **options)
    decode(encoded(Image.new(mode, (8, 8)), kind, **options))  # loads libraries
    assert peak_growth(lambda: decode(data)) < 25.5 * side * side


def picture(path: Path, shade: int, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 255 - shade, 128)).save(path, quality=95)


@pytest.fixture
def folder() -> Path:
    root = Path("images")
    for split, count in (("train", 3), ("val", 2)):
        for number in range(count):
            picture(root / split / "cat" / f"{number}.jpg", 20 * number)
            picture(root / split / "dog" / f"{number}.jpeg", 200 + number, size=(30, 50))
    return root


def test_class_folders_become_a_data_set(folder: Path) -> None:
    """Classes are sorted by name; files of any shape and mode get the requested size."""
    Image.new("L", (25, 25), 77).save(folder / "train" / "cat" / "grey.png")
    Image.new("RGBA", (25, 25), (9, 9, 9, 0)).save(folder / "train" / "dog" / "clear.png")
    data = open_folder(folder, DataConfig(image_size=16))
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.val or ())) == (8, 4)
    for index in range(8):
        image, label = data.train[index]
        assert (image.shape, image.dtype, label) == ((3, 16, 16), torch.uint8, index // 4)
    first = data.val[0][0]
    assert abs(first.float().mean(dim=(1, 2)) - torch.tensor([0.0, 255.0, 128.0])).max() < 3
    plain = open_folder(folder, DataConfig(image_size=16, augment="none"))
    assert torch.equal(plain.train[0][0], plain.train[0][0]), "--augment none"


CHANGES = {
    "removed": (lambda train, _: (train / "cat" / "1.jpg").unlink(), {"training": "5 images, the run had 6.*'cat'"}),
    "renamed": (lambda train, _: (train / "dog" / "1.jpeg").rename(train / "dog" / "x.jpeg"), {"training": "'dog'"}),
    "other size": (lambda train, _: (train / "cat" / "1.jpg").write_bytes(b"other"), {"training": "'cat'"}),
    "validation": (lambda _, val: (val / "dog" / "0.jpeg").unlink(), {"validation": "3 images, the run had 4.*'dog'"}),
    "class renamed": (
        lambda train, val: [split.joinpath("dog").rename(split / "wolf") for split in (train, val)],
        {"classes": "class 'dog' is now 'wolf'"},
    ),
    "class added": (
        lambda train, val: [shutil.copytree(split / "cat", split / "ape") for split in (train, val)],
        {"classes": "3 classes, the run had 2: class 'ape' is new"},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_files_is_named(folder: Path, change: str) -> None:
    """Ranks compare the names of files; a resumed run also compares their sizes."""

    def opened() -> DataSet:
        return open_folder(folder, DataConfig(image_size=16))

    act, expected = CHANGES[change]
    before, facts = identity.of(opened(), sizes=True), identity.facts(opened())
    assert identity.differences(identity.of(opened(), sizes=True), before) == {}
    act(folder / "train", folder / "val")
    found = identity.differences(identity.of(opened(), sizes=True), json.loads(json.dumps(before)))
    assert list(found) == list(expected)
    assert all(re.search(pattern, found[part]) for part, pattern in expected.items())
    assert (identity.facts(opened()) == facts) == (change == "other size")


def test_an_unreadable_image_is_named(folder: Path) -> None:
    """The error is one line, from the training process and from a loader process."""
    bad = folder / "train" / "cat" / "1.jpg"
    bad.write_bytes(bad.read_bytes()[:100])
    data = open_folder(folder, DataConfig(image_size=16))
    for workers in (0, 1):
        with closing(MapLoader(data.train, PLAIN, CPU, seed=0, num_workers=workers)) as loader:
            with pytest.raises(UsageError) as error:
                list(loader.load(0, assignments(EpochOrder(0, 0, 6), 0, BatchLayout(2, 2), 0, 1)))
            assert re.fullmatch(r"cannot read the image .*cat/1\.jpg: .*", str(error.value))
    bad.unlink()
    os.mkfifo(bad)
    with pytest.raises(UsageError, match=rf"cannot read the image {bad}: "):
        data.train[1]


def test_hidden_files_are_skipped(folder: Path) -> None:
    for name in (".cache/1.jpg", "__MACOSX/._1.jpg", "cat/._0.jpg", "cat/.thumbnails/0.jpg"):
        for split in ("train", "val"):
            (folder / split / name).parent.mkdir(exist_ok=True)
            (folder / split / name).write_bytes(b"no image")
    data = open_folder(folder, DataConfig(image_size=16))
    assert (data.classes, len(data.train), len(data.val or ())) == (("cat", "dog"), 6, 4)


def test_an_image_of_too_many_pixels_is_named(folder: Path) -> None:
    bomb = folder / "val" / "cat" / "1.jpg"
    bomb.write_bytes(BOMBS["jpeg"](12_000))
    with pytest.raises(UsageError, match=rf"the image {bomb}: .* more pixels than --max-image-pixels 90000000 allows"):
        open_folder(folder, DataConfig(image_size=16)).val[1]
    shutil.copytree(folder / "train", folder / "test")
    for split in ("train", "val", "test"):
        with pytest.raises(UsageError, match="--max-image-pixels 1199 allows"):
            getattr(open_folder(folder, DataConfig(image_size=16, max_image_pixels=1199)), split)[0]
        getattr(open_folder(folder, DataConfig(image_size=16, max_image_pixels=1200)), split)[0]


FAULTS = {
    "no folder": (lambda root: shutil.rmtree(root), r"images is not a folder"),
    "no val": (lambda root: shutil.rmtree(root / "val"), r"images/val is missing"),
    "empty train": (lambda root: (shutil.rmtree(root / "train"), (root / "train").mkdir()), r"images/train is empty"),
    "other classes": (lambda root: (root / "val" / "dog").rename(root / "val" / "wolf"), r"only in one: dog, wolf"),
    "empty class": (lambda root: [p.unlink() for p in (root / "train/dog").iterdir()], r"images/train: .*dog"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_used_is_refused(folder: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(UsageError, match=message) as caught:
        sources.open_data(DataConfig(data="folder", data_dir=folder), seed=0)
    assert "\n" not in str(caught.value)


def test_crops_equal_torchvision() -> None:
    usual = v2.Compose([v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip()])
    ours = RandomCrop(24)
    for width, height in ((500, 375), (33, 47), (300, 20), (9, 120)):
        image = whole(encoded(noise(width, height), quality=90))
        for seed in range(25):
            torch.manual_seed(seed)
            found = ours(image)
            torch.manual_seed(seed)
            assert torch.equal(found, usual(image)), (width, height, seed)
    image = whole(encoded(noise(250, 190)))
    middle = v2.Compose([v2.Resize(64, antialias=True), v2.CenterCrop(56)])
    assert torch.equal(CenterCrop(64, 56)(image), middle(image)), "evaluation"


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_of_a_thin_image_only_the_middle_is_resized(kind: str) -> None:
    for width, height in ((3000, 7), (2, 1000), (9000, 300)):
        data = encoded(noise(width, height), kind)
        for resize, crop in ((64, 56), (64, 64), (37, 20)):
            usual = v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(crop)])(whole(data))
            found = CenterCrop(resize, crop)(decode(data))
            assert (found.int() - usual.int()).abs().max() <= 1, (width, height, resize, crop)
    for size in ((20_000, 1), (1, 20_000)):
        data = encoded(noise(*size), kind)
        for view in (CenterCrop(256, 224), RandomCrop(224)):
            assert peak_growth(lambda data=data, view=view: view(decode(data))) < 20e6


def test_a_data_set_is_never_in_memory() -> None:
    root = Path("many")
    (root / "a").mkdir(parents=True)
    (root / "a" / "00.jpg").write_bytes(encoded(noise(1500, 1000), quality=60))
    for number in range(1, 60):
        (root / "a" / f"{number:02}.jpg").hardlink_to(root / "a" / "00.jpg")
    images = ImageFolder(root, ["a"], RandomCrop(32))
    images[0]
    before = psutil.Process().memory_info().rss
    for number in range(len(images)):
        images[number]
    assert psutil.Process().memory_info().rss - before < 27e6
