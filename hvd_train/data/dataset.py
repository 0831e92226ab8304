"""Data sets: samples in memory or read item by item, and facts for the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class MapDataset(Protocol):
    """A map-style data set of torch whose items are (image tensor [c, h, w], class number)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Tensor, int]: ...


@dataclass(frozen=True)
class Arrays:
    """A data set in memory."""

    images: Tensor  # [rows, c, h, w], uint8 or float
    labels: Tensor  # [rows], int64
    num_samples: int  # it may exceed the rows: sample i is row i % rows

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        row = index % len(self.images)
        return self.images[row], self.labels[row]  # type: ignore[return-value]

    def rows(self, numbers: Tensor) -> Tensor:
        """Return the rows of samples, int64 [n]."""
        return numbers % len(self.images)


@dataclass(frozen=True)
class Augment:
    """A random change of a batch in memory, with random numbers of each sample."""

    num_uniforms: int
    # images [n, c, h, w] float, uniforms [n, num_uniforms] in [0, 1)
    apply: Callable[[Tensor, Tensor], Tensor]


Source = Arrays | MapDataset


@dataclass(frozen=True)
class DataSet:
    """A training set, a validation set (or None), and facts for the model."""

    train: Source
    val: Source | None
    classes: tuple[str, ...]
    channels: int = 3
    mean: tuple[float, ...] = ()  # of each channel, values 0..1; without, images are not normalised
    std: tuple[float, ...] = ()
    augment: Augment | None = None  # changes whole batches of `Arrays`
    test: Source | None = None  # is evaluated once, at the end of training
    # whether items are (image, class number); else any trees of tensors, for other tasks
    images: bool = True
