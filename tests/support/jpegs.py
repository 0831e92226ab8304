"""Image files: class folders of handwritten digits, noise, and small files whose
headers claim many pixels.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_digits
from torch import Tensor

SIDE = 32


def digits(
    root: Path, classes: Iterable[int] = range(10), most: int | None = None, *, test: bool = False
) -> Path:
    """Write digits as 32 x 32 JPEG files below train/, val/ (one in five) and
    perhaps test/; return `root`.
    """
    raw = load_digits()
    for number in classes:
        found = np.flatnonzero(raw.target == number % 10)
        for split, chosen in (("train", found[np.arange(len(found)) % 5 > 0]), ("val", found[::5])):
            _write(root / split / f"{number:02}", raw.images[chosen[:most]], negative=number >= 10)
        if test:
            _write(
                root / "test" / f"{number:02}",
                raw.images[found[1::5][:most]],
                negative=number >= 10,
            )
    return root


def _write(folder: Path, images: np.ndarray, *, negative: bool) -> None:
    folder.mkdir(parents=True)
    for number, values in enumerate(images):
        grey = (values * (255 / 16)).astype(np.uint8)
        image = Image.fromarray(255 - grey if negative else grey).resize(
            (SIDE, SIDE), Image.Resampling.BICUBIC
        )
        image.convert("RGB").save(folder / f"{number:04}.jpg", quality=95)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return an image of noise, the same for each size."""
    values = np.random.default_rng(width * 1000 + height).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    return Image.fromarray(values).convert(mode)


def encoded(image: Image.Image, kind: str = "jpeg", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def whole(data: bytes) -> Tensor:
    """Return all pixels [3, height, width] of an image file as Pillow decodes them, upright."""
    with Image.open(BytesIO(data)) as image:
        return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB"))).permute(
            2, 0, 1
        )


def _jpeg(side: int) -> bytes:
    data = encoded(Image.new("RGB", (2, 2)), progressive=True, subsampling=0, optimize=True)
    # of the frame header
    return data.replace(struct.pack(">HHB", 2, 2, 3), struct.pack(">HHB", side, side, 3), 1)


def _png(side: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = encoded(Image.new("RGB", (2, 2)), "png")
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


# For each format a function of the side in pixels that returns the content of a file of less than a
# kilobyte.
BOMBS = {"jpeg": _jpeg, "png": _png}


def peak_growth(action: Callable[[], object]) -> int:
    """Return the most bytes by which an action makes this process grow."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what the process has now
    before = psutil.Process().memory_info().rss
    action()
    return (
        int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
        - before
    )
