"""What a data set is to this package: in memory or item by item, with what a model must know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hvd_train.data.augment import Augment

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


Mark = Callable[[str], None]
"""Is told, at the end of a stage on an image's way to the model, which one that was."""


def unmarked(stage: str) -> None:
    """Nobody wants to know."""


class MapDataset(Protocol):
    """What the user brings: a torch map-style data set whose items are (image tensor, class number)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Tensor, int]: ...


@runtime_checkable
class Staged(MapDataset, Protocol):
    """One that can say how far it is with an item: `hvd-train bench input` asks."""

    def staged_item(self, index: int, mark: Mark) -> tuple[Tensor, int]:
        """An item, whose stages `mark` hears of."""


@dataclass(frozen=True)
class Arrays:
    """A data set in memory: images [rows, c, h, w] (uint8 or float), labels [rows]; row = sample number % rows."""

    images: Tensor
    labels: Tensor
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples


Source = Arrays | MapDataset


@dataclass(frozen=True)
class DataSet:
    """A training set and a validation set (None: nothing to evaluate on) with what a model must know of them.

    `mean` and `std` (per channel, of values 0..1) normalise uint8 images; `augment` acts on batches of Arrays.
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
    """The same for one image at a time: torchvision's transforms, made when they are needed (slow to import)."""
    test: Source | None = None
    """To be evaluated on once, at the end."""
