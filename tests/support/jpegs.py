"""Class folders of real JPEG files, made from scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SIDE = 32


def digits(root: Path, classes: Iterable[int] = range(10), most: int | None = None, *, test: bool = False) -> Path:
    """Each digit as a JPEG of 32 x 32 pixels under train/ and val/ (every fifth), and test/ where it is wanted.

    Classes from 10 on are the same digits as negatives; `most`: so many images of a class in each split.
    """
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
