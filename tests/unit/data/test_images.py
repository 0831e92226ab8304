"""Image files, and class folders as data sets."""

import dataclasses
import json
import shutil
from collections.abc import Callable
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
from tests.support.jpegs import BOMBS, digits, encoded, noise, peak_growth, whole
from tests.support.runs import CPU, PLAIN

WAYS = [
    *(("RGB", "jpeg", {"subsampling": number}) for number in range(3)),
    *(("RGB", "jpeg", {option: True}) for option in ("progressive", "keep_rgb")),
    ("RGB", "jpeg", {"restart_marker_blocks": 3}),
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


def test_sixteen_bits_are_scaled() -> None:
    """Pillow's conversion would make most values white; values without
    a known range are refused.
    """
    grey = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    for kind in ("png", "tiff"):
        scaled = decode(encoded(Image.fromarray(grey), kind))[1]
        assert scaled.flatten().tolist() == [*range(256)]
    for dtype in (np.int32, np.float32):
        with pytest.raises(UNREADABLE, match=r"mode .*: grey values have 8 bits"):
            decode(encoded(Image.fromarray(grey.astype(dtype)), "tiff"))


def test_other_formats_are_refused_and_run_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content decides about the format; PostScript starts no Ghostscript."""
    Path("gs").write_text("#!/bin/sh\ntouch started\n")
    Path("gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for kind in ("eps", "gif"):
        with pytest.raises(UNREADABLE, match="none of JPEG, PNG, PPM, BMP, TIFF, WEBP"):
            decode(encoded(noise(16, 16), kind))
    assert not Path("started").exists()


@pytest.fixture
def folder() -> Path:
    """Return a folder with train/ and val/, of two classes with three images each."""
    return digits(Path("images"), (0, 1), 3)


def test_class_folders_become_a_data_set(folder: Path) -> None:
    """Classes are sorted by name; files of any shape and mode get the requested size."""
    Image.new("L", (25, 40), 77).save(folder / "train/00/grey.png")
    Image.new("RGB", (40, 30), (0, 255, 128)).save(folder / "val/00/0000.jpg", quality=95)
    data = open_folder(folder, DataConfig(image_size=16))
    assert data.classes == ("00", "01")
    items = [data.train[number] for number in range(len(data.train))]
    assert [label for _, label in items] == [0, 0, 0, 0, 1, 1, 1]
    assert {(image.shape, image.dtype) for image, _ in items} == {((3, 16, 16), torch.uint8)}
    first, label = data.val[0]
    assert abs(first.float().mean(dim=(1, 2)) - torch.tensor([0.0, 255.0, 128.0])).max() < 3
    assert (len(data.val), label) == (6, 0)


def test_a_split_or_files_are_prepared_as_for_an_evaluation(folder: Path) -> None:
    """Other splits need not be there, nor a folder of the split."""
    noise(40, 30).save(folder / "val/00/0000.jpg")
    config = DataConfig(data="folder", data_dir=folder, image_size=16, val_resize_size=20)

    def images(data: DataSet) -> torch.Tensor:
        assert data.classes == ("00", "01")
        return torch.stack([data.val[index][0] for index in range(6)])

    expected = images(sources.open_data(config, 0))
    files = images_in([folder / "val"])
    shutil.rmtree(folder / "train")
    again = dataclasses.replace(config, data_dir=folder / "val")
    for data in (
        sources.open_data(config, 0, split="val"),
        sources.open_data(again, 0, split="test"),
        sources.of_files(config, files, ("00", "01")),
    ):
        assert torch.equal(images(data), expected)


@pytest.mark.parametrize("augment", ["none", "standard", "trivial", "rand"])
def test_random_changes_of_images_belong_to_the_sample(augment: Any, folder: Path) -> None:
    """Each epoch has its own."""
    config = DataConfig(
        data="folder",
        data_dir=folder,
        image_size=16,
        random_erasing=0.5 * (augment != "none"),
        augment=augment,
    )

    def images(epoch: int, layout: BatchLayout) -> torch.Tensor:
        loader = MapLoader(sources.open_data(config, 0).train, PLAIN, CPU, seed=3, num_workers=0)
        batches = loader.load(epoch, assignments(EpochOrder(0, 0, 6), 0, layout, 0, 1))
        return torch.cat([micro.batch[0] for batch in batches for micro in batch.micro_batches])

    first = images(0, BatchLayout(6, 6))
    assert torch.equal(images(0, BatchLayout(2, 1)), first)
    assert torch.equal(images(1, BatchLayout(6, 6)), first) == (augment == "none")


@pytest.mark.parametrize(
    ("act", "part", "says"),
    [
        (
            lambda train, _: (train / "00/0001.jpg").rename(train / "00/9.jpg"),
            "training",
            "other images",
        ),
        (
            lambda _, val: (val / "01/0000.jpg").unlink(),
            "validation",
            "5 images, the run had 6",
        ),
        (
            lambda *splits: [shutil.copytree(split / "00", split / "0") for split in splits],
            "classes",
            "class 0 is '0', the run had '00'",
        ),
    ],
)
def test_a_change_of_the_files_is_named(
    act: Callable[..., object], part: str, says: str, folder: Path
) -> None:
    """Ranks compare them, and so does a resumed run."""
    config = DataConfig(image_size=16)
    before = identity.of(open_folder(folder, config))
    again = identity.of(open_folder(folder, config))
    assert identity.differences(again, before) == {}
    assert identity.facts(again) == identity.facts(before)
    act(folder / "train", folder / "val")
    after = identity.of(open_folder(folder, config))
    found = identity.differences(after, json.loads(json.dumps(before)))
    assert [*found] == [part]
    assert says in found[part]
    assert identity.facts(after) != identity.facts(before)


def test_an_image_that_cannot_be_decoded_is_named(folder: Path) -> None:
    """It is damaged, or has more pixels than the limit, which is the most that is decoded."""
    bad = folder / "train/00/0001.jpg"
    bad.write_bytes(bad.read_bytes()[:100])
    data = open_folder(folder, DataConfig(image_size=16, max_image_pixels=32 * 32)).train
    assert data[0][0].shape == (3, 16, 16)
    with pytest.raises(UsageError, match=r"^cannot read the image .*00/0001\.jpg: .*\Z"):
        data[1]
    data = open_folder(folder, DataConfig(image_size=16, max_image_pixels=32 * 32 - 1)).train
    says = r"00/0000\.jpg: .* more pixels than --max-image-pixels 1023 allows"
    with pytest.raises(UsageError, match=says):
        data[0]


def test_hidden_files_are_skipped(folder: Path) -> None:
    for name in (".cache/1.jpg", "__MACOSX/._1.jpg", "00/._0.jpg", "00/.thumbnails/0.jpg"):
        for split in ("train", "val"):
            path = folder / split / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"no image")
    data = open_folder(folder, DataConfig(image_size=16))
    assert (data.classes, len(data.train), len(data.val or ())) == (("00", "01"), 6, 6)


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_file_that_claims_many_pixels_takes_no_memory(kind: str) -> None:
    data = BOMBS[kind](65_000)

    def look() -> None:
        with pytest.raises(UNREADABLE, match="more pixels than --max-image-pixels 90000000 allows"):
            decode(data)

    assert peak_growth(look) < 16e6


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda root: (root / "val/01").rename(root / "val/02"), "only in one: 01, 02"),
        (
            lambda root: [path.unlink() for path in (root / "train/01").iterdir()],
            "images/train: .*01",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    damage: Callable[[Path], object], says: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(UsageError, match=says) as caught:
        sources.open_data(DataConfig(data="folder", data_dir=folder), seed=0)
    assert "\n" not in str(caught.value)
