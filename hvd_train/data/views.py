"""How training and evaluation see encoded images, by the settings."""

from __future__ import annotations

import torch
from torchvision.transforms import v2
from typing_extensions import override

from hvd_train.data.coded import Frame
from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, DataSet
from hvd_train.data.encoded import EncodedImages, Look, View
from hvd_train.data.pictures import Picture, Pixels
from hvd_train.data.transforms import training_transform
from hvd_train.settings.data import DataConfig

_VAL_CROP = 224 / 256  # share of the shorter side that evaluation shows; usual since AlexNet


class RandomCrop(View):
    """A view of a random part of an image, resized to `size` pixels and mirrored half of the time.

    It draws the same random numbers as torchvision's RandomResizedCrop and RandomHorizontalFlip and gives the same
    result, but decodes only that part of the file.
    """

    def __init__(self, size: int) -> None:
        self._size, self._crop = size, v2.RandomResizedCrop(size, antialias=True)

    @override
    def frame(self, picture: Picture | Pixels) -> Frame:
        image_of_this_size = torch.empty((1, picture.height, picture.width), device="meta")
        box = self._crop.make_params([image_of_this_size])
        size, mirrored = self._size, bool(torch.rand(1) < 0.5)
        return Frame(box["left"], box["top"], box["width"], box["height"], size, size, 0, 0, size, mirrored)


class CenterCrop(View):
    """A view of the middle `crop` pixels of an image whose shorter side is resized to `resize` pixels.

    It is that of torchvision's Resize and CenterCrop, which round sides down and places to the nearest pixel.
    """

    def __init__(self, resize: int, crop: int) -> None:
        self._resize, self._crop = resize, crop

    @override
    def frame(self, picture: Picture | Pixels) -> Frame:
        width, height = picture.width, picture.height
        shorter = min(width, height)
        resized = [int(self._resize * side / shorter) for side in (height, width)]
        window = [round((side - self._crop) / 2) for side in resized]
        return Frame(0, 0, width, height, resized[0], resized[1], window[0], window[1], self._crop, mirrored=False)


def of_training(config: DataConfig) -> Look:
    """Return how training sees images: random parts, with the changes that the config adds, or the middle."""
    view = CenterCrop(whole_side(config), _size(config)) if config.augment == "none" else RandomCrop(_size(config))
    return Look(view, training_transform(config, [], IMAGENET_MEAN), config.max_image_pixels, config.decode == "gpu")


def of_evaluation(config: DataConfig) -> Look:
    """Return how evaluation sees images: the middle, without random changes."""
    view = CenterCrop(*file_view(config))
    return Look(view, None, config.max_image_pixels, config.decode == "gpu")


def file_view(config: DataConfig) -> tuple[int, int]:
    """Return the pixels of the shorter side that evaluation resizes an image to, and of the square in its middle."""
    crop = config.val_crop_size or _size(config)
    return config.val_resize_size or round(crop / _VAL_CROP), crop


def whole_side(config: DataConfig) -> int:
    """Return the pixels of the shorter side of an image of which training sees `--image-size` pixels."""
    return round(_size(config) / _VAL_CROP)


def data_set(
    config: DataConfig,
    classes: tuple[str, ...],
    train: EncodedImages,
    val: EncodedImages | None,
    test: EncodedImages | None,
    note: str | None = None,
    refusal: str | None = None,
) -> DataSet:
    """Return the data set of these images, normalised as ImageNet is; the last two are as in DataSet."""
    return DataSet(
        train=train,
        val=val,
        test=test,
        classes=classes,
        channels=3,
        image_size=_size(config),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        file_view=file_view(config),
        note=note,
        refusal=refusal,
    )


def _size(config: DataConfig) -> int:
    return config.image_size or 224
