"""What a data set is: samples in memory or read item by item, and what a model must know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from hvd_train.data.augment import Augment
from hvd_train.data.coded import Coded
from hvd_train.data.trees import Tree, leaves

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


Mark = Callable[[str], None]
"""A function that is called at the end of each stage of an image's way to the model, with the name of the stage."""


def unmarked(stage: str) -> None:
    """Ignore the end of a stage: the mark of those who do not measure."""


class MapDataset(Protocol):
    """A map-style data set of torch; users bring such ones.

    Its items are (image tensor [c, h, w], class number) or, for other tasks than classification, (inputs, targets), two
    trees of tensors and numbers.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


@runtime_checkable
class Staged(MapDataset, Protocol):
    """A map-style data set of torch that reports the stages of reading an item, for `hvd-train bench input`."""

    def staged_item(self, index: int, mark: Mark) -> tuple[Tensor | Coded, int]:
        """Return an item, or a file that a GPU is to decode, and call `mark` at the end of each stage of reading it."""


@dataclass(frozen=True)
class Arrays:
    """A data set in memory: inputs and targets, trees of tensors whose first dimension are the rows.

    Of images the inputs are [rows, c, h, w] (uint8 or float), and the targets numbers of classes [rows] (int64). Sample
    number i is row i % rows, so that `num_samples` may exceed the rows.
    """

    inputs: Tree
    targets: Tree
    num_samples: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(leaves(self.inputs)[0])

    def __len__(self) -> int:
        return self.num_samples


Source = Arrays | MapDataset
SplitName = Literal["train", "val", "test"]


@dataclass(frozen=True)
class DataSet:
    """A training set and a validation set (None: nothing to evaluate on), with what a model must know of them.

    `classes` are the names of the classes; data of other tasks than classification may have none.

    `image_size` is the side in pixels, None if images come in any size. `mean` and `std`, of each channel of images
    with values 0..1, normalise them; empty ones leave them as they are. `augment` changes whole batches of `Arrays`.
    """

    train: Source
    val: Source | None
    classes: tuple[str, ...] = ()
    channels: int = 3
    """Of an image; in a table the numbers of a row."""
    image_size: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: Augment | None = None
    transforms: Callable[[], tuple[Any, ...]] = tuple
    """Makes transforms of torchvision that do to a single image what `augment` does to a batch. A function, because
    torchvision is slow to import."""
    test: Source | None = None
    """A set that is evaluated once, at the end of training."""
    file_view: tuple[int, int] | None = None
    """How evaluation sees an image file: the pixels of its resized shorter side, and of the square in its middle. None
    where files are not what the images come from, so that nobody can say."""
    note: str | None = None
    """What the user should know about how a fresh training on these data starts."""
    vocabulary: int | None = None
    """How many different tokens there are, in a text."""
    refusal: str | None = None
    """Why no training can begin with these data on this host, if so. One that has begun goes on."""
