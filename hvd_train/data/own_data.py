"""The user's own data: two map-style data sets of torch, as most people have them, and one line for what is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from hvd_train.data.dataset import Arrays, DataSet, Source, Staged
from hvd_train.data.trees import is_tree, leaves
from hvd_train.errors import UsageError
from hvd_train.launch.error_report import say_once


def from_result(name: str, result: Any) -> DataSet:
    """Return the data set in what the user's function has returned; `name` is that of the function.

    Classes that have no names are counted in the labels. Raises UsageError for data of another form, and for labels
    that are no numbers of classes.
    """
    if isinstance(result, DataSet):
        return result
    parts = _parts(name, result)
    for title, part in parts.items():
        _check_form(title, part)
    labels = {title: _labels(part) for title, part in parts.items()}
    classes = _class_names(result[0])
    if classes is None:
        labels = {
            title: _read_labels(title, parts[title]) if found is None else found for title, found in labels.items()
        }
        most = max((int(found.max()) for found in labels.values() if found is not None and len(found)), default=-1)
        classes = tuple(str(number) for number in range(most + 1))
    for title, found in labels.items():
        if found is not None:
            _check_range(title, found, len(classes))
        elif not isinstance(parts[title], Staged):
            parts[title] = _Checked(title, parts[title], len(classes))
    train, *rest = map(_in_memory, parts.values())
    val = rest[0] if rest and len(rest[0]) else None
    return DataSet(train, val, classes, _num_channels(result[0]))


def of_any_form(name: str, result: Any) -> DataSet:
    """Return the data set in what the user's function has returned, for a task whose items may be of any form.

    An item is (inputs, targets), two trees of tensors and numbers. Raises UsageError for data of another form.
    """
    if isinstance(result, DataSet):
        return result
    parts = _parts(name, result)
    for title, part in parts.items():
        if len(part) and not (isinstance(part[0], (tuple, list)) and len(part[0]) == 2):
            raise UsageError(f"{title} has items that are no pairs; return (inputs, targets)")
    train, *rest = map(_in_memory_as_they_are, parts.values())
    val = rest[0] if rest and len(rest[0]) else None
    return DataSet(train, val, _class_names(result[0]) or (), _width(result[0]))


def whole_items(title: str, data: Any) -> Source:
    """Return a data set whose inputs are the items of `data`, each a tree of tensors and numbers, without targets.

    `data` are a map-style data set, or rows in memory: a tree of tensors. `title` is what they are called in errors.
    Raises UsageError for anything else, and where there is nothing in it.
    """
    if isinstance(data, TensorDataset) and _has_items_of(TensorDataset, data):
        data = data.tensors
    in_memory = not isinstance(data, list) and is_tree(data) and bool(leaves(data))
    if in_memory:
        rows = {len(tensor) if tensor.ndim else 0 for tensor in leaves(data)}
        if len(rows) > 1:
            raise UsageError(f"{title} has tensors of {min(rows)} and of {max(rows)} rows")
        source: Source = Arrays(data, (), rows.pop())
    else:
        _check_is_map(title, data)
        source = _WholeItems(data)
    if not len(source):
        raise UsageError(f"{title} is empty")
    return source


@dataclass(frozen=True)
class _WholeItems:
    """A data set whose items are inputs as a whole."""

    data: Any

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, tuple[()]]:
        return self.data[index], ()


@dataclass(frozen=True)
class WholeBatches:
    """A collate of the user's, which returns a whole batch, as one of inputs without targets."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, items: list[tuple[Any, tuple[()]]]) -> tuple[Any, tuple[()]]:
        """Return what the user's collate makes of the items."""
        return self.collate([item for item, _ in items]), ()


def _parts(name: str, result: Any) -> dict[str, Any]:
    """Return the sets in what the user's function has returned, each by what it is called in errors."""
    if not isinstance(result, (tuple, list)) or len(result) != 2 or result[0] is None:
        raise UsageError(f"--data {name}: it must return (training set, validation set or None)")
    parts = {
        f"--data {name}: its {which} set": part
        for which, part in zip(("training", "validation"), result, strict=True)
        if part is not None
    }
    for title, part in parts.items():
        _check_is_map(title, part)
    return parts


def _in_memory_as_they_are(part: Any) -> Any:
    if _is_tensors(part):
        inputs, targets = part.tensors
        return Arrays(inputs, targets, len(targets))
    return part


def _width(part: Any) -> int:
    """Return the channels of the first image, or the numbers of the first row."""
    inputs = part[0][0] if len(part) else None
    return len(inputs) if isinstance(inputs, torch.Tensor) and inputs.ndim in (1, 3) else 3


@dataclass(frozen=True)
class _Checked:
    """A data set whose labels are in its items alone: each is checked as it is read."""

    title: str
    part: Any
    num_classes: int

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.part[index]
        if not 0 <= label < self.num_classes:
            raise UsageError(
                f"{self.title} has the label {int(label)} at item {index}; those of {self.num_classes} classes are "
                f"0 to {self.num_classes - 1}"
            )
        return image, label


def _check_is_map(title: str, part: Any) -> None:
    if isinstance(part, DataLoader):
        raise UsageError(f"{title} is a DataLoader; return its `dataset`: batches and their order are the trainer's")
    if isinstance(part, IterableDataset) or not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
        raise UsageError(
            f"{title} is a {type(part).__name__}, whose items have no numbers; return a map-style data set, with "
            "__len__ and __getitem__"
        )


def _check_form(title: str, part: Any) -> None:
    if len(part) == 0:
        return
    item = part[0]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        found = f"of {len(item)} parts" if isinstance(item, (tuple, list)) else f"of type {type(item).__name__}"
        raise UsageError(f"{title} has items {found}; return (image tensor, class number)")
    image, label = item
    if not isinstance(image, torch.Tensor):
        todo = {
            "Image": "put torchvision.transforms.v2.ToImage() at the end of its transforms",
            "ndarray": "return torch.from_numpy(image), with the channels first",
        }
        hint = next((todo[base.__name__] for base in type(image).__mro__ if base.__name__ in todo), "return a tensor")
        raise UsageError(f"{title} has images of type {type(image).__name__}; {hint}")
    number = label.item() if isinstance(label, (torch.Tensor, np.generic)) and label.ndim == 0 else label
    kinds = (int, float) if _is_tensors(part) else int  # labels of tensors become whole numbers
    if isinstance(number, bool) or not isinstance(number, kinds):
        raise UsageError(f"{title} has labels of type {type(label).__name__}; return the number of the class, an int")


def _class_names(part: Any) -> tuple[str, ...] | None:
    """Return the names of the classes that a data set has, or the one that it is a part of; None where it has none."""
    while not hasattr(part, "classes") and isinstance(part, Subset):
        part = part.dataset
    return tuple(map(str, part.classes)) if hasattr(part, "classes") else None


def _num_channels(part: Any) -> int:
    image = part[0][0] if len(part) else torch.empty(0)
    return len(image) if image.ndim == 3 else 3


def _labels(part: Any) -> torch.Tensor | None:
    """Return the labels of a data set that has them side by side, as those of torchvision do; None for another.

    None, too, where the items with the least and the greatest label return others: a subclass may give them new ones.
    """
    labels = _side_by_side(part)
    if labels is None or not len(labels):
        return labels
    ends = (int(labels.argmin()), int(labels.argmax()))
    return labels if all(int(part[index][1]) == int(labels[index]) for index in ends) else None


def _side_by_side(part: Any) -> torch.Tensor | None:
    if isinstance(part, Subset):
        labels = _side_by_side(part.dataset) if _has_items_of(Subset, part) else None
        return None if labels is None else labels[torch.as_tensor(part.indices, dtype=torch.long)]
    if _is_tensors(part):
        return cast(torch.Tensor, part.tensors[1].long())
    targets = getattr(part, "targets", None)
    if getattr(part, "target_transform", None) is None and isinstance(targets, (Sequence, np.ndarray, torch.Tensor)):
        with suppress(ValueError, TypeError, RuntimeError):  # what cannot be a tensor
            labels = torch.as_tensor(targets)
            return labels if labels.shape == (len(part),) and not labels.is_floating_point() else None
    return None


def _is_tensors(part: Any) -> bool:
    """Return whether a data set is rows or images and labels in memory, and nothing else than those."""
    return isinstance(part, TensorDataset) and _has_items_of(TensorDataset, part) and len(part.tensors) == 2


def _has_items_of(base: type, part: Any) -> bool:
    """Return whether a data set returns its items as its base does, in no way of its own."""
    return vars(base)["__getitem__"] is getattr(type(part), "__getitem__", None)


def _read_labels(title: str, part: Any) -> torch.Tensor:
    say_once(f"{title} has no attribute `classes`: reading its {len(part):,} items once, to count them in the labels")
    return torch.tensor([int(part[index][1]) for index in range(len(part))])


def _check_range(title: str, labels: torch.Tensor, num_classes: int) -> None:
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise UsageError(
            f"{title} has labels from {int(labels.min())} to {int(labels.max())}; those of {num_classes} classes are "
            f"0 to {num_classes - 1}"
        )


def _in_memory(part: Any) -> Any:
    if _is_tensors(part):
        images, labels = part.tensors
        return Arrays(images, labels.long(), len(labels))
    return part
