"""Image files, and class folders as data sets."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from hvd_train.config import DataConfig
from hvd_train.data import identity, sources
from hvd_train.data.dataset import DataSet
from hvd_train.data.folder import UNREADABLE, decode, images_in, open_folder
from hvd_train.data.loader import MapLoader
from hvd_train.errors import UsageError
from hvd_train.progress.order import BatchLayout, EpochOrder, assignments
from tests.support.jpegs import BOMBS, encoded, noise, peak_growth, whole
from tests.support.runs import CPU, PLAIN

WAYS: list[tuple[str, str, dict[str, Any]]] = [
    *(("RGB", "jpeg", {"subsampling": number}) for number in range(3)),
    *(
        ("RGB", "jpeg", way)
        for way in ({"progressive": True}, {"restart_marker_blocks": 3}, {"keep_rgb": True})
    ),
    *((mode, "jpeg", {}) for mode in ("L", "CMYK")),
    *((mode, "png", {}) for mode in ("RGB", "P", "RGBA", "1")),
    ("RGB", "webp", {}),
]


@pytest.mark.parametrize(("mode", "kind", "options"), WAYS)
def test_an_image_has_the_pixels_of_pillow(mode: str, kind: str, options: dict[str, Any]) -> None:
    for width, height in ((1, 1), (7, 90), (129, 65), (200, 150)):
        data = encoded(noise(width, height, mode), kind, **options)
        assert torch.equal(decode(data), whole(data)), (width, height)
    for orientation in range(1, 9) if kind == "jpeg" else ():
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(noise(40, 24, mode), kind, exif=exif, **options)
        assert torch.equal(decode(data), whole(data)), orientation


GREY = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)


def test_sixteen_bits_are_scaled() -> None:
    """Pillow's conversion would make most values white; values without
    a known range are refused.
    """
    for kind in ("png", "tiff"):
        assert torch.equal(
            decode(encoded(Image.fromarray(GREY), kind))[1].flatten().int(), torch.arange(256)
        )
    for dtype in (np.int32, np.float32):
        with pytest.raises(UNREADABLE, match=r"mode .*: grey values have 8 bits"):
            decode(encoded(Image.fromarray(GREY.astype(dtype)), "tiff"))


def test_other_formats_are_refused_and_run_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content decides about the format; PostScript starts no Ghostscript."""
    (tmp_path / "gs").write_text("#!/bin/sh\ntouch started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for kind in ("eps", "gif", "jpeg2000"):
        with pytest.raises(UNREADABLE, match="none of JPEG, PNG, PPM, BMP, TIFF, WEBP"):
            decode(encoded(noise(16, 16), kind))
    assert not Path("started").exists()


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


def test_a_split_or_files_are_prepared_as_for_an_evaluation(folder: Path) -> None:
    """Other splits need not be there, nor a folder of the split."""
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "val" / "cat" / "0.jpg")
    config = DataConfig(data="folder", data_dir=folder, image_size=16, val_resize_size=20)
    val = sources.open_data(config, 0).val
    expected = torch.stack([val[index][0] for index in range(4)])
    files = images_in([folder / "val"])
    shutil.rmtree(folder / "train")
    again = dataclasses.replace(config, data_dir=folder / "val")
    for data in (
        sources.open_data(config, 0, split="val"),
        sources.open_data(again, 0, split="test"),
        sources.of_files(config, files, ("cat", "dog")),
    ):
        assert data.classes == ("cat", "dog")
        assert torch.equal(torch.stack([data.val[index][0] for index in range(4)]), expected)


@pytest.mark.parametrize(
    ("changes", "is_random"),
    [
        ({"augment": "none"}, False),
        *(({"augment": name}, True) for name in ("standard", "trivial", "rand")),
    ],
    ids=["none", "standard", "trivial", "rand"],
)
def test_random_changes_of_images_belong_to_the_sample(
    changes: dict[str, Any], is_random: bool, folder: Path
) -> None:
    """Each epoch has its own; other data sets refuse the changes that are made for files."""
    config = DataConfig(
        data="folder", data_dir=folder, image_size=16, random_erasing=0.5 * is_random, **changes
    )

    def images(epoch: int, layout: BatchLayout) -> torch.Tensor:
        loader = MapLoader(sources.open_data(config, 0).train, PLAIN, CPU, seed=3, num_workers=0)
        batches = loader.load(epoch, assignments(EpochOrder(0, 0, 6), 0, layout, 0, 1))
        return torch.cat([micro.batch[0] for batch in batches for micro in batch.micro_batches])

    assert torch.equal(images(0, BatchLayout(6, 6)), images(0, BatchLayout(2, 1)))
    assert torch.equal(images(0, BatchLayout(6, 6)), images(1, BatchLayout(6, 6))) is not is_random
    if is_random:
        with pytest.raises(UsageError, match="do not go with --data digits"):
            sources.open_data(DataConfig(random_erasing=0.5, **changes), 0)


CHANGES = {
    "name": (
        lambda train, _: (train / "cat/1.jpg").rename(train / "cat/9.jpg"),
        {"training": "other images"},
    ),
    "validation": (
        lambda _, val: (val / "dog" / "0.jpeg").unlink(),
        {"validation": "3 images, the run had 4"},
    ),
    "class added": (
        lambda train, val: [
            shutil.copytree(split / "cat", split / "ape") for split in (train, val)
        ],
        {"classes": "class 0 is 'ape', the run had 'cat'"},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_files_is_named(folder: Path, change: str) -> None:
    """Ranks compare them, and so does a resumed run."""

    def opened() -> DataSet:
        return open_folder(folder, DataConfig(image_size=16))

    act, expected = CHANGES[change]
    before = identity.of(opened())
    facts = identity.facts(identity.of(opened()))
    assert identity.differences(identity.of(opened()), before) == {}
    act(folder / "train", folder / "val")
    found = identity.differences(identity.of(opened()), json.loads(json.dumps(before)))
    assert list(found) == list(expected)
    assert all(re.search(pattern, found[part]) for part, pattern in expected.items())
    assert identity.facts(identity.of(opened())) != facts


def test_an_image_that_cannot_be_decoded_is_named(folder: Path) -> None:
    """It is damaged, or has more pixels than the limit, which is the most that is decoded."""
    bad = folder / "train" / "cat" / "1.jpg"
    bad.write_bytes(bad.read_bytes()[:100])
    data = open_folder(folder, DataConfig(image_size=16, max_image_pixels=1200)).train
    assert data[0][0].shape == (3, 16, 16)
    with pytest.raises(UsageError, match=r"^cannot read the image .*cat/1\.jpg: .*\Z"):
        data[1]
    data = open_folder(folder, DataConfig(image_size=16, max_image_pixels=1199)).train
    with pytest.raises(
        UsageError, match=r"cat/0\.jpg: .* more pixels than --max-image-pixels 1199 allows"
    ):
        data[0]


def test_hidden_files_are_skipped(folder: Path) -> None:
    for name in (".cache/1.jpg", "__MACOSX/._1.jpg", "cat/._0.jpg", "cat/.thumbnails/0.jpg"):
        for split in ("train", "val"):
            (folder / split / name).parent.mkdir(exist_ok=True)
            (folder / split / name).write_bytes(b"no image")
    data = open_folder(folder, DataConfig(image_size=16))
    assert (data.classes, len(data.train), len(data.val or ())) == (("cat", "dog"), 6, 4)


FAULTS = {
    "no val": (lambda root: shutil.rmtree(root / "val"), r"images/val is missing"),
    "other classes": (
        lambda root: (root / "val" / "dog").rename(root / "val" / "wolf"),
        r"only in one: dog, wolf",
    ),
    "empty class": (
        lambda root: [p.unlink() for p in (root / "train/dog").iterdir()],
        r"images/train: .*dog",
    ),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_file_that_claims_many_pixels_takes_no_memory(kind: str) -> None:
    data = BOMBS[kind](65_000)

    def look() -> None:
        with pytest.raises(UNREADABLE, match="more pixels than --max-image-pixels 90000000 allows"):
            decode(data)

    assert peak_growth(look) < 16e6


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_used_is_refused(folder: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(UsageError, match=message) as caught:
        sources.open_data(DataConfig(data="folder", data_dir=folder), seed=0)
    assert "\n" not in str(caught.value)
