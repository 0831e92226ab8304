"""What a data set is: samples in memory or read item by item, and what a model must know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from hvd_train.data.augment import Augment

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


Numbers = TypeVar("Numbers", int, Tensor)
Mark = Callable[[str], None]
"""A function that is called at the end of each stage of an image's way to the model, with the name of the stage."""


def unmarked(stage: str) -> None:
    """Ignore the end of a stage: the mark of those who do not measure."""


class MapDataset(Protocol):
    """A map-style data set of torch whose items are (image tensor [c, h, w], class number); users bring such ones."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Tensor, int]: ...


@runtime_checkable
class Staged(MapDataset, Protocol):
    """A map-style data set that reports the stages of reading an item, for `hvd-train bench input`."""

    def staged_item(self, index: int, mark: Mark) -> tuple[Tensor, int]:
        """Return an item, and call `mark` at the end of each stage of reading it."""


@dataclass(frozen=True)
class Arrays:
    """A data set in memory: images [rows, c, h, w] (uint8 or float) and labels [rows] (int64).

    Sample number i is row i % rows, so that `num_samples` may exceed the rows.
    """

    images: Tensor
    labels: Tensor
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def rows(self, numbers: Numbers) -> Numbers:
        """Return the row of a sample, or the rows of several, int64 [n]."""
        return numbers % len(self.images)


Source = Arrays | MapDataset


@dataclass(frozen=True)
class DataSet:
    """A training set and a validation set (None: nothing to evaluate on), with what a model must know of them.

    `image_size` is the side in pixels, None if images come in any size. `mean` and `std`, of each channel of images
    with values 0..1, normalise them; empty ones leave them as they are. `augment` changes whole batches of `Arrays`.
    """

    train: Source
    val: Source | None
    classes: tuple[str, ...]
    channels: int = 3
    image_size: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: Augment | None = None
    transforms: Callable[[], tuple[Any, ...]] = tuple
    """Makes transforms of torchvision that do to a single image what `augment` does to a batch. A function, because
    torchvision is slow to import."""
    test: Source | None = None  # a set that is evaluated once, at the end of training
