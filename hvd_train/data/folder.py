"""Class folders of image files: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.io import ImageReadMode, decode_image, read_file
from torchvision.transforms import v2

from hvd_train.config import DataConfig
from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, DataSet, Mark, unmarked
from hvd_train.data.transforms import training_transform
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
        return self.staged_item(index, unmarked)

    def staged_item(self, index: int, mark: Mark) -> tuple[Tensor, int]:
        """The same, which tells `mark` when it is read, decoded and changed."""
        path, label = self.samples[index]
        try:
            content = read_file(path)
            mark("read")
            image = decode_image(content, mode=ImageReadMode.RGB, apply_exif_orientation=True)
            mark("decode")
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(f"cannot read the image {path}: {reason}; mend or remove it") from None
        changed: Tensor = self._transform(image)
        mark("augment")
        return changed, label


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
    whole, middle = (
        [v2.Resize(resize, antialias=True), v2.CenterCrop(side)]
        for resize, side in ((config.val_resize_size or round(crop / _VAL_CROP), crop), (round(size / _VAL_CROP), size))
    )
    change = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    train = training_transform(config, middle if config.augment == "none" else change, IMAGENET_MEAN)
    return DataSet(
        train=ImageFolder(root / "train", classes, train),
        val=ImageFolder(root / "val", classes, v2.Compose(whole)),
        test=ImageFolder(root / "test", classes, v2.Compose(whole)) if "test" in splits else None,
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
