"""Data sets of image files in class folders: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from typing_extensions import override

from hvd_train import plain_file
from hvd_train.data import views
from hvd_train.data.cache_folder import CacheFolder
from hvd_train.data.coded import Coded
from hvd_train.data.dataset import DataSet, Mark
from hvd_train.data.encoded import EncodedImages, Look, Texts
from hvd_train.data.image_cache import ImageCache
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig


class ImageFolder(EncodedImages):
    """The image files of one split."""

    def __init__(self, root: Path, classes: list[str], look: Look, cache: ImageCache | None = None) -> None:
        """List the files below `root`/CLASS. Raises UsageError where a class has no images.

        With a `cache`, through which all images are seen then, none is for a GPU to decode.
        """
        numbers = {name: number for number, name in enumerate(classes)}
        try:
            samples = make_dataset(str(root), numbers, extensions=IMG_EXTENSIONS)
        except FileNotFoundError as error:
            raise UsageError(f"{root}: {error}") from None
        super().__init__(torch.tensor([label for _, label in samples]), look)
        self._names = Texts.of(os.fsencode(path[len(str(root)) + 1 :]) for path, _ in samples)
        self._root, self._cache = root, cache

    def path(self, index: int) -> Path:
        """Return the path of the file of a sample."""
        return self._root / os.fsdecode(self._names[index])

    @override
    def name(self, index: int) -> str:
        return str(self.path(index))

    @override
    def read(self, index: int) -> bytes:
        return plain_file.read_bytes(self.path(index))

    def missing(self) -> tuple[int, int]:
        """Return about how many bytes the cache still needs for all images, and for how many files."""
        return (0, 0) if self._cache is None else self._cache.missing(len(self), self.path)

    @override
    def _seen(self, index: int, mark: Mark, *, for_gpu: bool) -> Tensor | Coded:
        if self._cache is None:
            return super()._seen(index, mark, for_gpu=for_gpu)
        image = self._look.view(self._cache.pixels(self.path(index), mark))
        mark("crop")
        return image


def open_folder(root: Path, config: DataConfig) -> DataSet:
    """Return the data set of the folder `root`: train/, val/ and, if there is one, test/.

    Raises UsageError where train/, val/ or a class is missing or empty, or where the splits have different classes.
    """
    if not root.is_dir():
        raise UsageError(f"--data-dir {root} is not a folder; it must hold train/ and val/")
    splits = ["train", "val", *(["test"] if (root / "test").is_dir() else [])]
    classes, *others = (_classes(root / split) for split in splits)
    for split, names in zip(splits[1:], others, strict=True):
        if only := sorted(set(classes) ^ set(names)):
            raise UsageError(
                f"{root}: train/ and {split}/ must have the same classes; only in one: {', '.join(only[:5])}"
            )
    place = CacheFolder.of(config, root)
    cache = (
        partial(ImageCache, place, max_pixels=config.max_image_pixels) if place is not None else lambda root, side: None
    )
    train = ImageFolder(
        root / "train", classes, views.of_training(config), cache(root / "train", views.whole_side(config))
    )
    val, test = (
        ImageFolder(root / split, classes, views.of_evaluation(config), cache(root / split, views.file_view(config)[0]))
        if split in splits
        else None
        for split in ("val", "test")
    )
    missing, files = map(sum, zip(*(part.missing() for part in (train, val, test) if part is not None), strict=True))
    note, refusal = place.plan(missing, files) if place is not None and files else (None, None)
    return views.data_set(config, tuple(classes), train, val, test, note, refusal)


def _classes(split: Path) -> list[str]:
    if not split.is_dir():
        raise UsageError(f"{split} is missing; the data folder must hold train/ and val/ with one folder per class")
    try:
        names: list[str] = find_classes(str(split))[0]
    except FileNotFoundError:
        raise UsageError(f"{split} is empty; it must hold one folder of images per class") from None
    return names
