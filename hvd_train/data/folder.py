"""Class folders of image files: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.transforms import v2

from hvd_train.config import DataConfig
from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, DataSet, Mark, unmarked
from hvd_train.data.pictures import UNREADABLE, Picture
from hvd_train.data.transforms import training_transform
from hvd_train.errors import UsageError

_VAL_CROP = 224 / 256  # the share of the shorter side that evaluation looks at, usual since AlexNet


View = Callable[[Picture, Mark], Tensor]
"""How an image file becomes an image of one size, uint8 [3, size, size]."""


class RandomCrop:
    """A random part, resized, every other one mirrored: torchvision's RandomResizedCrop and RandomHorizontalFlip.

    With their numbers and their results, but of the file only that part is decoded.
    """

    def __init__(self, size: int) -> None:
        self._side, self._crop = [size, size], v2.RandomResizedCrop(size, antialias=True)

    def __call__(self, picture: Picture, mark: Mark = unmarked) -> Tensor:
        """See View."""
        of_this_size = torch.empty((1, picture.height, picture.width), device="meta")
        box = self._crop.make_params([of_this_size])
        part = picture.part(box["left"], box["top"], box["width"], box["height"])
        mark("decode")
        image: Tensor = v2.functional.resize(part, self._side, antialias=True)
        return image.flip(-1) if torch.rand(1) < 0.5 else image


class Middle:
    """The middle of the image resized, always the same."""

    def __init__(self, resize: int, crop: int) -> None:
        self._change = v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(crop)])

    def __call__(self, picture: Picture, mark: Mark = unmarked) -> Tensor:
        """See View."""
        whole = picture.part(0, 0, picture.width, picture.height)
        mark("decode")
        image: Tensor = self._change(whole)
        return image


class ImageFolder:
    """The images of one split; an item is (uint8 image [3, size, size], class number).

    The list of files is three tensors: loader processes share them, and looking at one writes nothing, as it would to
    the reference counts of a list of paths, page after page. No image is kept.
    """

    def __init__(self, root: Path, classes: list[str], view: View, transform: Any = None) -> None:
        numbers = {name: number for number, name in enumerate(classes)}
        try:
            samples = make_dataset(str(root), numbers, extensions=IMG_EXTENSIONS)
        except FileNotFoundError as error:  # a class without images
            raise UsageError(f"{root}: {error}") from None
        names = [os.fsencode(path[len(str(root)) + 1 :]) for path, _ in samples]
        self.labels = torch.tensor([label for _, label in samples])
        self._names = torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8)
        self._ends = torch.tensor([len(name) for name in names]).cumsum(0)
        self._root, self._view, self._transform = root, view, transform

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        """The file of a sample."""
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        return self._root / os.fsdecode(self._names[start:end].numpy().tobytes())

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Raises UsageError that names the file where it is not an image."""
        return self.staged_item(index, unmarked)

    def staged_item(self, index: int, mark: Mark) -> tuple[Tensor, int]:
        """The same, which tells `mark` when it is read, decoded and changed."""
        path = self.path(index)
        try:
            data = path.read_bytes()
            mark("read")
            image = self._view(Picture(data), mark)
        except UNREADABLE as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(f"cannot read the image {path}: {reason}; mend or remove it") from None
        image = image if self._transform is None else self._transform(image)
        mark("augment")
        return image, int(self.labels[index])


def open_folder(root: Path, config: DataConfig) -> DataSet:
    """The splits under `root`: train/, val/ and, where it is there, test/.

    Raises UsageError where a split is missing or empty, or the splits do not have the same classes.
    """
    size = config.image_size or 224
    crop = config.val_crop_size or size
    if not root.is_dir():
        raise UsageError(f"--data-dir {root} is not a folder; it must hold train/ and val/")
    splits = ["train", "val", *(["test"] if (root / "test").is_dir() else [])]
    classes, *others = (_classes(root / split) for split in splits)
    for split, found in zip(splits[1:], others, strict=True):
        if only := sorted(set(classes) ^ set(found)):
            raise UsageError(
                f"{root}: train/ and {split}/ must have the same classes; only in one: {', '.join(only[:5])}"
            )
    whole = Middle(config.val_resize_size or round(crop / _VAL_CROP), crop)
    plain = config.augment == "none"
    view = Middle(round(size / _VAL_CROP), size) if plain else RandomCrop(size)
    change = training_transform(config, [], IMAGENET_MEAN)
    return DataSet(
        train=ImageFolder(root / "train", classes, view, change),
        val=ImageFolder(root / "val", classes, whole),
        test=ImageFolder(root / "test", classes, whole) if "test" in splits else None,
        classes=tuple(classes),
        channels=3,
        image_size=size,
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
