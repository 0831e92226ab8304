"""Check the user's own data sets before the first step and as items are read."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from hvd_train.data.dataset import Arrays, DataSet, MapDataset, Staged
from hvd_train.errors import UsageError


def from_result(name: str, result: Any) -> DataSet:
    """Return the data set in `result`, of the user's function `name`. Raises UsageError now or as items are read."""
    titles = [f"the {part} set of --data {name}" for part in ("training", "validation", "test")]
    if not isinstance(result, DataSet):
        if not isinstance(result, (tuple, list)) or len(result) != 2 or result[0] is None:
            raise UsageError(f"--data {name}: it must return (training set, validation set or None)")
        train, val = map(_in_memory, titles, result)
        result = DataSet(train, val, _class_names(name, result[0], train))
    parts = zip(titles, (result.train, result.val, result.test), strict=True)
    train, val, test = (_checked(title, _in_memory(title, part), len(result.classes)) for title, part in parts)
    return DataSet(**{**vars(result), "train": train, "val": val, "test": test})


@dataclass(frozen=True)
class _Items:
    """A map-style data set that checks each item, and returns labels as ints."""

    title: str
    data: MapDataset
    num_classes: int
    form: tuple[object, ...] | None = None  # type and shape of all images

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        item: Any = self.data[index]
        if isinstance(item, (tuple, list)) and len(item) == 2:
            image, number = item[0], _class_number(item[1])
            is_image = isinstance(image, Tensor) and self.form in (None, (image.dtype, image.shape))
            if is_image and number is not None and 0 <= number < self.num_classes:
                return image, number
        raise UsageError(
            f"item {index} of {self.title} is {_described(item)}; return (image tensor, integer class number from "
            f"0 to {self.num_classes - 1}), with images of one type and size"
        )


def _in_memory(title: str, part: Any) -> Any:
    if part is None or isinstance(part, Arrays):
        return part
    if isinstance(part, IterableDataset) or not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
        raise UsageError(f"{title} is {_described(part)}; return a map-style data set, with __len__ and __getitem__")
    is_plain = type(part).__getitem__ is TensorDataset.__getitem__ and len(part.tensors) == 2
    return Arrays(part.tensors[0], part.tensors[1], len(part)) if is_plain else part


def _class_names(name: str, original: Any, train: Any) -> tuple[str, ...]:
    with suppress(TypeError):  # `classes` is no list
        if names := tuple(map(str, getattr(original, "classes", ()))):
            return names
    if isinstance(train, Arrays):
        last = max(_class_number(label) or 0 for label in [0, *train.labels.tolist()])
        return tuple(map(str, range(min(last + 1, 1_000_000))))  # a larger label is a mistake
    raise UsageError(f"--data {name}: the training set needs an attribute `classes`: the list of class names")


def _checked(title: str, part: Any, num_classes: int) -> Any:
    if part is None or isinstance(part, Staged):
        return part
    if not len(part):
        raise UsageError(f"{title} is empty")
    in_memory = isinstance(part, Arrays)
    items = _Items(title, TensorDataset(part.images, part.labels) if in_memory else part, num_classes)
    image, _ = items[0]
    labels = getattr(part, "targets", getattr(part, "labels", None))
    labels = labels.tolist() if isinstance(labels, (Tensor, np.ndarray)) else labels
    if isinstance(labels, (list, tuple)) and len(labels) == len(items):
        # If a label looks wrong, check its item, which may have another label.
        items[next((i for i, label in enumerate(labels) if _class_number(label) not in range(num_classes)), 0)]
    if in_memory:
        return replace(part, labels=part.labels.reshape(-1).long())
    return replace(items, form=(image.dtype, image.shape))


def _class_number(label: Any) -> int | None:
    if isinstance(label, int):
        return int(label)
    with suppress(TypeError, ValueError, RuntimeError):  # what numpy cannot take
        array = np.asarray(label.cpu() if isinstance(label, Tensor) else label)
        return int(array.item()) if array.size == 1 and array.dtype.kind in "biu" else None
    return None


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value[:4]))})"
    if (number := _class_number(value)) is not None:
        return str(number)
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else type(value).__name__
