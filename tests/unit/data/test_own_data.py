"""The user's own data: what most people have works, and the rest is one line that says what to return."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split
from torchvision.datasets import FakeData

from hvd_train.data.dataset import Arrays
from hvd_train.data.own_data import from_result
from hvd_train.errors import UsageError
from hvd_train.run import train
from tests.support.runs import small_config


class Items(Dataset[Any]):
    """Nine items of three classes, whose first parts `make` makes."""

    def __init__(self, image: Any, label: Any = int, *more: Any) -> None:
        self._image, self._label, self._more = image, label, more

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (self._image, self._label(index % 3), *self._more)


class Stream(IterableDataset[Any]):
    """Items without numbers."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield torch.zeros(1, 2, 2), 0


class Named(Items):
    """Items that have the numbers of their classes side by side, and names for those."""

    classes = ("a", "b")
    targets = (0, 1, 2) * 3


class Halves(Named):
    """Items whose `targets` their labels no longer are."""

    targets = (0, 1, 9) * 3

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self._image, int(self.targets[index] > 0)


class Remapped(Subset[Any]):
    """A part of a data set with other labels."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.dataset[self.indices[index]]
        return image, int(label) // 4

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
        return [self[index] for index in indices]


class Doubled(TensorDataset):
    """Tensors whose items are others."""

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        row, label = (tensor[index] for tensor in self.tensors)
        return 2 * row, int(label > 0)


PIXELS = torch.zeros(1, 2, 2)
TENSORS = TensorDataset(torch.zeros(6, 4), torch.tensor([0, 1, 4, 0, 1, 2]))


@pytest.mark.parametrize(
    ("result", "classes", "reads"),
    [
        ((Items(PIXELS), None), 3, 1),
        ((Items(PIXELS), Items(PIXELS)), 3, 2),
        (random_split(Items(PIXELS), [6, 3]), 3, 2),
        ((Items(PIXELS, torch.tensor), None), 3, 1),
        ((Items(PIXELS, np.int32), None), 3, 1),
        ((Items(torch.zeros(7)), None), 3, 1),
        ([Subset(TENSORS, [0, 1]), Subset(TENSORS, [2])], 5, 0),
        ((TENSORS, None), 5, 0),
        ((TensorDataset(torch.zeros(2, 4), torch.tensor([0.0, 1.0])), None), 2, 0),
    ],
)
def test_classes_without_names_are_counted_in_the_labels(
    result: Any, classes: int, reads: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of both sets; where items must be read for that, it is said once for each set."""
    assert from_result("mine:data", result).classes == tuple(map(str, range(classes)))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == reads
    assert all("has no attribute `classes`: reading its" in line for line in told)


def test_a_part_of_a_data_set_has_its_classes() -> None:
    """As `random_split` makes it."""
    parts = random_split(Named(PIXELS), [5, 4])
    with pytest.raises(UsageError, match="has labels from 0 to 2; those of 2 classes are 0 to 1"):
        from_result("mine:data", parts)
    assert from_result("mine:data", (Subset(Subset(Named(PIXELS), [0, 1, 3]), [0, 2]), None)).classes == ("a", "b")


@pytest.mark.parametrize("part", [Halves(PIXELS), Subset(Halves(PIXELS), range(9)), Remapped(TENSORS, [1, 2, 4])])
@pytest.mark.parametrize("named", [True, False])
def test_labels_are_those_of_the_items(part: Any, named: bool) -> None:
    """Whatever a data set, or the one that it is a part of, has as `targets`."""
    part = copy(part)
    if named:
        part.classes = ("a", "b")
    assert len(from_result("mine:data", (part, None)).classes) == 2


def test_items_that_tensors_became_are_kept() -> None:
    """A subclass of TensorDataset may change them."""
    made = from_result("mine:data", (Doubled(torch.ones(3, 4), torch.tensor([0, 3, 7])), None))
    assert made.classes == ("0", "1")
    assert not isinstance(made.train, Arrays)
    assert made.train[1][0].tolist() == [2.0] * 4


def test_a_part_may_be_empty() -> None:
    """As `random_split` makes it of a length 0; there is nothing to evaluate on then."""
    made = from_result("mine:data", random_split(TENSORS, [6, 0]))
    assert (made.classes, made.val) == (tuple("01234"), None)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "it must return (training set, validation set or None)"),
        (Items(PIXELS), "it must return (training set, validation set or None)"),
        ((DataLoader(Items(PIXELS)), None), "its training set is a DataLoader; return its `dataset`"),
        ((Items(PIXELS), Stream()), "its validation set is a Stream, whose items have no numbers; return a map-style"),
        ((Items(PIXELS, int, 5), None), "its training set has items of 3 parts; return (image tensor, class number)"),
        ((["a"], None), "its training set has items of type str; return (image tensor, class number)"),
        (
            (FakeData(4, (3, 8, 8)), None),
            "has images of type Image; put torchvision.transforms.v2.ToImage() at the end",
        ),
        ((Items(Image.new("L", (2, 2))), None), "images of type Image; put torchvision.transforms.v2.ToImage()"),
        ((Items(np.zeros((2, 2))), None), "has images of type ndarray; return torch.from_numpy(image)"),
        ((Items([0.0]), None), "has images of type list; return a tensor"),
        ((Items(PIXELS, str), None), "has labels of type str; return the number of the class, an int"),
        ((Items(PIXELS, float), None), "has labels of type float; return the number of the class, an int"),
        ((Items(PIXELS, lambda k: torch.eye(3)[k]), None), "has labels of type Tensor; return the number of the class"),
        (
            (Items(PIXELS, lambda k: k - 1), None),
            "its training set has labels from -1 to 1; those of 2 classes are 0 to 1",
        ),
        (
            (TensorDataset(torch.zeros(3, 4), torch.tensor([0, -1, 2])), None),
            "has labels from -1 to 2; those of 3 classes",
        ),
        ((TensorDataset(torch.zeros(3, 4), torch.eye(3)), None), "has labels of type Tensor; return the number"),
    ],
)
def test_what_cannot_be_used_says_what_to_return(result: Any, told: str) -> None:
    """In one line, before anything is started."""
    with pytest.raises(UsageError) as caught:
        from_result("mine:data", result)
    assert str(caught.value).startswith("--data mine:data: ")
    assert told in str(caught.value)


def test_a_label_that_is_no_class_is_named_with_its_item() -> None:
    """Where it is found in training only: the data set has names of classes, and labels in its items alone."""
    part = Items(PIXELS)
    part.classes = ("a", "b")  # type: ignore[attr-defined]
    told = r"its training set has the label 2 at item [258]; those of 2 classes are 0 to 1"
    with pytest.raises(UsageError, match=told):
        train(small_config(epochs=1, workers=0, global_batch_size=9), data=lambda config: (part, None))


@pytest.mark.parametrize("image", [PIXELS, torch.zeros(7)])
@pytest.mark.parametrize("label", [int, np.int32, lambda k: torch.tensor(k, dtype=torch.uint8)])
def test_parts_of_a_plain_data_set_train(image: Tensor, label: Any) -> None:
    """Images, and rows of numbers; labels of any type of whole numbers."""
    config = small_config(epochs=1, workers=0, global_batch_size=3)
    sets = random_split(Items(image, label), [6, 3])
    result = train(config, model=lambda n: nn.Sequential(nn.Flatten(), nn.LazyLinear(n)), data=lambda config: sets)
    assert result.finished


@pytest.mark.parametrize("model", ["digits-convnet", "squeezenet1_1"])
def test_grey_images_train_networks_by_name(model: str) -> None:
    """Those of torchvision see them three times."""
    sets = (Items(torch.zeros(1, 32, 32)), None)
    config = small_config(epochs=1, workers=0, global_batch_size=3, model=model)
    assert train(config, data=lambda config: sets).finished


@pytest.mark.parametrize(
    ("given", "told"),
    [({"data": Items(PIXELS)}, "data must be a function"), ({"model": nn.Linear(1, 1)}, "model must be a function")],
)
def test_a_thing_in_the_place_of_a_function_is_refused(given: dict[str, Any], told: str) -> None:
    """The line says which function is wanted."""
    with pytest.raises(UsageError, match=told):
        train(small_config(), **given)
