"""Class folders of image files: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, DataSet
from hvd_train.errors import UsageError

_VAL_CROP = 224 / 256  # the share of the shorter side that evaluation looks at, usual since AlexNet


class ImageFolder:
    """The images of one split; an item is (uint8 image [3, size, size], class number)."""

    def __init__(self, root: Path, classes: list[str], transform: Any) -> None:
        numbers = {name: number for number, name in enumerate(classes)}
        try:
            self.samples = make_dataset(str(root), numbers, extensions=IMG_EXTENSIONS)
        except FileNotFoundError as error:  # a class without images
            raise UsageError(f"{root}: {error}") from None
        self._transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Raises UsageError that names the file where it is not an image."""
        path, label = self.samples[index]
        try:
            image = decode_image(path, mode=ImageReadMode.RGB, apply_exif_orientation=True)
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(f"cannot read the image {path}: {reason}; mend or remove it") from None
        return self._transform(image), label


def open_folder(root: Path, image_size: int, *, augment: bool, seed: int) -> DataSet:
    """The two splits under `root`, resized to `image_size` pixels a side.

    Raises UsageError where a split is missing or empty, or the splits do not have the same classes.
    """
    if not root.is_dir():
        raise UsageError(f"--data-dir {root} is not a folder; it must hold train/ and val/")
    train_classes, val_classes = (_classes(root / split) for split in ("train", "val"))
    if train_classes != val_classes:
        only = sorted(set(train_classes) ^ set(val_classes))
        raise UsageError(f"{root}: train/ and val/ must have the same classes; only in one: {', '.join(only[:5])}")
    whole = [v2.Resize(round(image_size / _VAL_CROP), antialias=True), v2.CenterCrop(image_size)]
    change = [v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip()]
    return DataSet(
        train=ImageFolder(root / "train", train_classes, v2.Compose(change if augment else whole)),
        val=ImageFolder(root / "val", train_classes, v2.Compose(whole)),
        classes=tuple(train_classes),
        channels=3,
        image_size=image_size,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _classes(split: Path) -> list[str]:
    if not split.is_dir():
        raise UsageError(f"{split} is missing; the data folder must hold train/ and val/ with one folder per class")
    try:
        names: list[str] = find_classes(str(split))[0]
    except FileNotFoundError:
        raise UsageError(f"{split} is empty; it must hold one folder of images per class") from None
    return names
