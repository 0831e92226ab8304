"""Parts of image files are those of the whole image, whichever decoder reads them."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from hvd_train.data import pictures
from hvd_train.data.pictures import UNREADABLE, Picture
from tests.support.bombs import BOMBS, peak_growth
from tests.support.jpegs import encoded, noise, whole

WAYS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 3},
    "without colour transform": {"keep_rgb": True},
    "optimized": {"optimize": True, "quality": 40},
}


def test_this_package_has_its_decoder_of_parts() -> None:
    """A package that was installed with a compiler, as for these tests, has the faster decoder."""
    assert pictures.region_library() is not None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_part_of_a_jpeg_is_that_of_the_whole(way: str, mode: str) -> None:
    """A part is equal to the bit, wherever it lies on the grid of blocks, and the rest is not decoded."""
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


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGB", "png"), ("L", "png"), ("P", "png"), ("RGBA", "png"), ("1", "png"), ("CMYK", "jpeg"), ("RGB", "webp")],
)
def test_other_formats_come_as_pillow_shows_them(mode: str, kind: str) -> None:
    """Files of other formats and modes become red, green and blue pixels as Pillow converts them."""
    data = encoded(noise(30, 20, mode), kind)
    assert torch.equal(Picture(data).part(3, 4, 20, 10), whole(data)[:, 4:14, 3:23])


def test_sixteen_bits_become_the_upper_eight() -> None:
    """Images of 16 bits are scaled to 8; Pillow's conversion alone would make all but the darkest values white."""
    values = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    part = Picture(encoded(Image.fromarray(values), "png")).part(0, 0, 16, 16)
    assert torch.equal(part[1].flatten(), torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_image_is_set_upright(orientation: int) -> None:
    """An image is turned as its Exif data say; one that is marked as upright is still decoded in part only."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(40, 24), exif=exif)
    picture, expected = Picture(data), whole(data)
    assert (picture.height, picture.width) == tuple(expected.shape[1:])
    assert torch.equal(picture.part(5, 2, 15, 20), expected[:, 2:22, 5:20])
    assert (picture._whole is None) == (orientation == 1)


def test_a_file_that_was_cut_off_is_unreadable() -> None:
    """A file that was cut off is refused wherever it was cut, even below the part that is asked for."""
    data = encoded(noise(64, 64), quality=90)
    for length in range(0, len(data), 97):
        with pytest.raises(UNREADABLE):
            Picture(data[:length]).part(0, 0, 8, 1)


def test_a_damaged_file_is_unreadable_or_as_pillow_shows_it() -> None:
    """Changed bytes lead to an error or to the pixels that Pillow decodes, and never end the process."""
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


@pytest.mark.parametrize("kind", ["gif", "tga", "pcx", "ico", "dds", "sgi", "jpeg2000"])
def test_a_format_that_is_not_meant_is_not_opened(kind: str) -> None:
    """Only the formats whose endings a data folder may hold are tried, whatever else Pillow could read."""
    with pytest.raises(UNREADABLE, match="none of JPEG, PNG, PPM, BMP, TIFF, WEBP"):
        Picture(encoded(noise(16, 16), kind))


def test_no_file_starts_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostScript under another name runs no program."""
    (tmp_path / "gs").write_text("#!/bin/sh\ntouch started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    with pytest.raises(UNREADABLE, match="none of JPEG"):
        Picture(encoded(noise(16, 16), "eps"))
    assert not Path("started").exists()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("side", [10_000, 13_000, 65_000])
@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_file_that_claims_many_pixels_costs_nothing(
    kind: str, side: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is enough to refuse an image above the limit: no memory for its pixels is taken, nothing is warned."""
    if not compiled:
        monkeypatch.setattr(pictures, "region_library", lambda: None)
    data = BOMBS[kind](side)
    assert len(data) < 1000

    def look() -> None:
        with pytest.raises(UNREADABLE, match="more pixels than --max-image-pixels 90000000 allows"):
            Picture(data).part(0, 0, 8, 8)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak_growth(look) < 16e6


@pytest.mark.parametrize("kind", BOMBS)
def test_the_limit_is_the_largest_image_that_is_decoded(kind: str) -> None:
    """An image of as many pixels as the limit is decoded without a warning; one pixel more is too many."""
    data = encoded(noise(30, 20), kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Picture(data, max_pixels=600).part(0, 0, 30, 20).shape == (3, 20, 30)
    with pytest.raises(UNREADABLE, match="--max-image-pixels 599"):
        Picture(data, max_pixels=599)


def test_a_limit_above_that_of_pillow_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit may be raised beyond the one that Pillow has of its own, which stays as it was for other code."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for kind in BOMBS:
        assert Picture(encoded(noise(30, 20), kind), max_pixels=600).width == 30
    assert Image.MAX_IMAGE_PIXELS == 100


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        ("RGB", "jpeg", {"progressive": True, "subsampling": 0}),
        ("CMYK", "jpeg", {"progressive": True, "subsampling": 0}),
        ("RGBA", "png", {}),
        ("RGBA", "webp", {"lossless": True}),
        ("CMYK", "tiff", {"compression": "tiff_deflate"}),
    ],
)
def test_decoding_takes_memory_in_proportion_to_the_pixels(mode: str, kind: str, options: dict[str, Any]) -> None:
    """The dearest files of each format take at most the 25 bytes a pixel that the setting names."""
    side = 2000
    data = encoded(Image.new(mode, (side, side)), kind, **options)
    assert len(data) < 200_000
    Picture(encoded(Image.new(mode, (8, 8)), kind, **options)).part(0, 0, 8, 8)  # what is loaded once
    assert peak_growth(lambda: Picture(data).part(0, 0, side // 4, side)) < 25.5 * side * side
