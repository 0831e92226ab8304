"""Image files: class folders of scikit-learn's handwritten digits as JPEG files, and images of noise."""

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_digits
from torch import Tensor

SIDE = 32


def digits(root: Path, classes: Iterable[int] = range(10), most: int | None = None, *, test: bool = False) -> Path:
    """Write digits as 32 x 32 JPEG files below train/, val/ (one in five) and perhaps test/; return `root`."""
    raw = load_digits()
    for number in classes:
        found = np.flatnonzero(raw.target == number % 10)
        for split, chosen in (("train", found[np.arange(len(found)) % 5 > 0]), ("val", found[::5])):
            _write(root / split / f"{number:02}", raw.images[chosen[:most]], negative=number >= 10)
        if test:
            _write(root / "test" / f"{number:02}", raw.images[found[1::5][:most]], negative=number >= 10)
    return root


def _write(folder: Path, images: np.ndarray, *, negative: bool) -> None:
    folder.mkdir(parents=True)
    for number, values in enumerate(images):
        grey = (values * (255 / 16)).astype(np.uint8)
        image = Image.fromarray(255 - grey if negative else grey).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        image.convert("RGB").save(folder / f"{number:04}.jpg", quality=95)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return an image of noise, the same for each size."""
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def encoded(image: Image.Image, kind: str = "jpeg", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def whole(data: bytes) -> Tensor:
    """Return all pixels [3, height, width] of an image file as Pillow decodes them, upright."""
    with Image.open(BytesIO(data)) as image:
        return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB"))).permute(2, 0, 1)
