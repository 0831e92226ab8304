"""What is seen of a JPEG file, decoded and resized in one go, is what Pillow and torch make of it."""

from __future__ import annotations

import ctypes
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hvd_train.data import pictures
from hvd_train.data.coded import Frame
from hvd_train.data.pictures import Picture
from hvd_train.data.views import CenterCrop
from tests.support.bombs import peak_growth
from tests.support.jpegs import encoded, noise, whole

pytestmark = pytest.mark.numeric

SIZES = ((640, 480), (224, 224), (37, 210), (9, 500), (3, 2))


def frames(width: int, height: int, count: int) -> list[Frame]:
    """Return frames of an image of this size: of any part, shrunk, enlarged or as it is, and of any window."""
    chance = random.Random(width)
    found = []
    for number in range(count):
        wide, high = chance.randint(1, width), chance.randint(1, height)
        left, top = chance.randint(0, width - wide), chance.randint(0, height - high)
        resized_height, resized_width = (
            (high, wide) if number == 0 else (chance.randint(1, 300), chance.randint(1, 300))
        )
        side = chance.randint(1, min(resized_height, resized_width))
        window = chance.randint(0, resized_height - side), chance.randint(0, resized_width - side)
        found.append(Frame(left, top, wide, high, resized_height, resized_width, *window, side, chance.random() < 0.5))
    return found


def resized(image: torch.Tensor, frame: Frame) -> torch.Tensor:
    """Return what torch makes of a whole image."""
    part = image[:, frame.top : frame.top + frame.height, frame.left : frame.left + frame.width]
    size = [frame.resized_height, frame.resized_width]
    return frame.window(F.interpolate(part[None], size=size, mode="bilinear", antialias=True)[0])


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_frame_is_that_of_torch(width: int, height: int) -> None:
    """Any part in any size, and any window of it, is equal to the bit, and the rest is not decoded."""
    data = encoded(noise(width, height), quality=85)
    image, picture = whole(data), Picture(data)
    for frame in frames(width, height, 60):
        assert torch.equal(picture.seen(frame), resized(image, frame)), frame
    assert picture._whole is None


def test_other_files_are_resized_alike() -> None:
    """A PNG file, which Pillow decodes, gives what torch makes of its bytes, on every processor."""
    data = encoded(noise(90, 70), "png")
    for frame in frames(90, 70, 10):
        assert torch.equal(Picture(data).seen(frame), resized(whole(data), frame)), frame


def test_what_does_not_lie_in_the_image_is_not_decoded() -> None:
    """A part beside the image, and a window beside the resized part, are refused before memory is written."""
    picture = Picture(encoded(noise(64, 48)))
    sound = (4, 2, 60, 46, 30, 40, 6, 9, 24, 31, 0)
    assert picture._jpeg(sound) is not None
    for place, value in ((0, 5), (0, -1), (1, 3), (1, -1), (2, 61), (2, 0), (3, 47), (3, -4), (4, 29), (5, 39)):
        assert picture._jpeg((*sound[:place], value, *sound[place + 1 :])) is None, (place, value)
    for place, value in ((6, 7), (6, -1), (7, 10), (7, -1)):
        assert picture._jpeg((*sound[:place], value, *sound[place + 1 :])) is None, (place, value)


def test_a_line_of_pixels_takes_little_memory() -> None:
    """An image of 20,000 x 1 pixels, which evaluation enlarges to 5 million pixels in width, takes 20 MB at most."""
    picture = Picture(encoded(noise(20_000, 1)))
    assert peak_growth(lambda: CenterCrop(256, 224)(picture)) < 20e6
    assert picture._whole is None


def compiled(folder: Path, old: str = "", new: str = "", *flags: str) -> ctypes.CDLL:
    """Return the decoder compiled anew, with these flags and with other text in a place of its source."""
    source = Path(pictures.__file__).with_name("jpeg_region.c")
    assert old in source.read_text()
    (folder / "changed.c").write_text(source.read_text().replace(old, new))
    command = ["gcc", "-O1", *flags, "-ffp-contract=off", "-shared", "-fPIC", f"-I{source.parent}"]
    subprocess.run([*command, folder / "changed.c", "-o", folder / "changed.so", "-ldl"], check=True, timeout=60)
    library = ctypes.CDLL(str(folder / "changed.so"))
    pictures.declare(library)
    assert library.region_library(pictures.library_path().encode())
    return library


OTHERS = {
    "a processor without SSE 2": ("", "", "-U__SSE2__"),
    "a libjpeg of another inside": ("theirs.dli_fbase != library.dli_fbase", "1"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_machines_get_the_same_pixels(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain C for any processor, and the codes as libjpeg reads them itself, give what this machine's decoder gives."""
    data = encoded(noise(640, 480), quality=85)
    found = [Picture(data).seen(frame) for frame in frames(640, 480, 40)]
    library = compiled(tmp_path, *OTHERS[other])
    monkeypatch.setattr(pictures, "region_library", lambda: library)
    picture = Picture(data)
    assert all(map(torch.equal, found, [picture.seen(frame) for frame in frames(640, 480, 40)]))
    assert picture._whole is None


def kinds() -> list[bytes]:
    """Return files with the Huffman tables that most files have, and with tables of their own."""
    image = noise(160, 120)
    return [encoded(image, quality=quality, optimize=own) for quality in (30, 96) for own in (False, True)]


def is_right(data: bytes) -> bool:
    """Return whether a part of the image is that of the whole, and was decoded without Pillow."""
    picture = Picture(data)
    return torch.equal(picture.part(7, 9, 140, 100), whole(data)[:, 9:109, 7:147]) and picture._whole is None


def test_tables_of_another_file_are_not_taken() -> None:
    """Files with several Huffman tables, read in turns, are decoded each with its own."""
    files = kinds()
    assert all(is_right(files[number]) for number in (0, 0, 1, 0, 2, 2, 3, 3, 1, 2, 0))


def test_threads_may_decode_at_once() -> None:
    """Threads that read files with several Huffman tables at the same time do not disturb each other."""
    files = kinds()
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, 200 * files))


def test_values_that_files_of_8_bits_do_not_need_are_left_to_libjpeg() -> None:
    """A file whose Huffman table names values of 15 bits is as Pillow shows it."""
    data = bytearray(encoded(noise(64, 64), quality=90))
    table = data.index(b"\xff\xc4")
    place = data.index(bytes([0xF9, 0xFA]), table)  # the last symbols of a table of the standard
    data[place] = 0xFF
    changed = bytes(data)
    assert torch.equal(Picture(changed).part(0, 0, 64, 64), whole(changed))
