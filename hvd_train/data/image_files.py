"""Image files that the user has named, as a data set: each as evaluation sees the images of another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from hvd_train import plain_file
from hvd_train.data.dataset import DataSet
from hvd_train.data.encoded import unreadable
from hvd_train.data.pictures import UNREADABLE, Picture
from hvd_train.data.views import CenterCrop
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig

_LUMA = (0.299, 0.587, 0.114)  # what red, green and blue add to grey, as in JPEG and in Pillow


def find(named: Sequence[Path]) -> list[Path]:
    """Return the files that are named, and those with the ending of an image below each folder, in order.

    Raises UsageError where something is not there, and for a folder without images.
    """
    found = list[Path]()
    for path in named:
        if not path.exists():
            raise UsageError(f"{path}: no such image or folder")
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS and file.is_file())
        if not inside:
            raise UsageError(f"{path} holds no images; their names must end in {', '.join(IMG_EXTENSIONS)}")
        found += inside
    return found


class ImageFiles:
    """A map-style data set of image files [channels, side, side] uint8, whose class numbers are all 0."""

    def __init__(self, paths: Sequence[Path], view: tuple[int, int], channels: int, max_pixels: int) -> None:
        """`view` is that of `DataSet.file_view`; one channel is grey."""
        self._paths, self._view = paths, CenterCrop(*view)
        self._channels, self._max_pixels = channels, max_pixels

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an item. Raises UsageError that names the file where it cannot be read as an image."""
        path = self._paths[index]
        try:
            image = self._view(Picture(plain_file.read_bytes(path), self._max_pixels))
        except UNREADABLE as error:
            raise unreadable(path, error) from None
        if self._channels == 1:
            image = (image * torch.tensor(_LUMA).view(3, 1, 1)).sum(0, keepdim=True).round().to(torch.uint8)
        return image, 0


def in_place_of_validation(data: DataSet, config: DataConfig, *, paths: Sequence[Path]) -> DataSet:
    """Return a data set that has these files as its validation set, to be seen as its own images are.

    Raises UsageError where it cannot be known how, since its images come from the user's own code.
    """
    if data.file_view is None:
        raise UsageError(
            f"--data {config.data} makes its images itself, so that nobody else knows how a file becomes one: type "
            "--split val, or have it return a DataSet with a file_view"
        )
    return replace(data, val=ImageFiles(paths, data.file_view, data.channels, config.max_image_pixels))
