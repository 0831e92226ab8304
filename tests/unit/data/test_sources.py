"""Data sets by name, and data sets of the user."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import Subset, TensorDataset
from torchvision.datasets import CIFAR10, CIFAR100

from hvd_train.config import DataConfig
from hvd_train.data import sources
from hvd_train.data.dataset import DataSet
from hvd_train.errors import UsageError
from tests.support import cifar


def test_the_digits_are_scikit_learns() -> None:
    """Any seed leaves the same 360 images for validation."""
    raw = load_digits()
    images = torch.from_numpy((raw.images * (255 / 16)).round().astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(raw.target)
    rows = np.random.default_rng(1998).permutation(len(labels))
    for seed in (0, 1):
        data = sources.open_data(DataConfig(data="digits"), seed)
        assert (len(data.val), len(data.train), len(data.classes)) == (360, 1437, 10)
        assert torch.equal(torch.cat([data.val.images, data.train.images]), images[rows])
        assert torch.equal(torch.cat([data.val.labels, data.train.labels]), labels[rows])


IMAGE = torch.zeros(3, 4, 4)
IMAGES = torch.stack([IMAGE] * 2)


class Items(list[Any]):
    """A data set with two classes."""

    classes = ("a", "b")
    transform: Any = None


def opened(*parts: Any) -> DataSet:
    return sources.open_data(DataConfig(data="mine:data"), 0, own=lambda config: parts)


def test_files_become_images_as_in_own_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the transform of the validation set, or by the size of images of
    bytes; other data are refused.
    """
    Image.new("RGB", (8, 6), (255, 0, 0)).save("red.png")

    def image_of_file(name: str, *parts: Any) -> Any:
        monkeypatch.setattr("hvd_train.plugin.load", lambda *_: lambda config: parts)
        return sources.of_files(DataConfig(data=name), [Path("red.png")], ("a", "b")).val[0][0]

    train = Items([(IMAGE, 0)])
    val = Items([(IMAGE, 0)])
    with pytest.raises(UsageError, match="not known how it makes an image of a file: give its"):
        image_of_file("mine:data", train, Subset(val, [0]))
    val.transform = lambda image: torch.full((3, 4, 4), image.width)
    image = image_of_file("mine:data", train, Subset(val, [0]))
    assert torch.equal(image, torch.full((3, 4, 4), 8))
    assert image_of_file("cifar10").shape == (3, 32, 32)  # whose own files are not read
    image = image_of_file("mine:data", Items([(torch.zeros(1, 5, 4, dtype=torch.uint8), 0)]), None)
    assert (image.dtype, image.shape, int(image[0, 0, 0])) == (torch.uint8, (1, 5, 4), 76)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([0, 1], dtype=np.uint16),
        [False, True],
        torch.tensor([0, 1]).int(),
        torch.tensor([[0], [1]]),
    ],
)
def test_own_labels_may_be_integers_of_any_type(labels: Any) -> None:
    """As a number, a scalar, or a tensor with one element; in memory they become int64."""
    train = opened(Items((IMAGE, label) for label in labels), Items([(IMAGE, labels[1])])).train
    assert [repr(train[n][1]) for n in range(2)] == ["0", "1"]
    if isinstance(labels, torch.Tensor):
        data = opened(TensorDataset(IMAGES, labels), None)
        assert (data.classes, data.train.labels.dtype) == (("0", "1"), torch.int64)
        assert data.train.labels.tolist() == [0, 1]


def test_attributes_of_a_tensor_data_set_are_kept() -> None:
    """--sample-weights and --length-buckets may name them."""
    data = TensorDataset(IMAGES, torch.tensor([0, 1]))
    data.weights = [1.0, 3.0]
    train = opened(data, None).train
    assert [each for each in sources.inner_sets(train) if hasattr(each, "weights")] == [data]


def test_classes_of_own_data_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Their names save the reading of all items, also of a set that was split."""
    counted = opened([(IMAGE, 0), (IMAGE, 2)], None)
    assert (counted.classes, counted.channels) == (("0", "1", "2"), 3)
    assert opened([(IMAGE[:1], 0)], None).channels == 1
    assert "--data mine:data: reading all labels to count the classes" in capsys.readouterr().err
    assert opened(Subset(Items([(IMAGE, 0), (IMAGE, 1)]), [0]), None).classes == ("a", "b")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "wrong",
    [
        (IMAGE, 2),
        (IMAGE, np.int8(-1)),
        (IMAGE.numpy(), 0),
    ],
)
def test_own_items_of_another_form_are_named(wrong: object) -> None:
    """Item 0 is checked at once, other items when they are read."""
    good = (IMAGE, 1)
    says = "item 0 of the {} set of --data mine:data is .*below 2"
    with pytest.raises(UsageError, match=says.format("training")):
        opened(Items([wrong]), None)
    with pytest.raises(UsageError, match=says.format("validation")):
        opened(Items([good]), Items([wrong]))
    with pytest.raises(UsageError, match="item 2 of the training set"):
        opened(Items([good, good, wrong]), None).train[2]


@pytest.mark.parametrize("image", [IMAGE.double(), IMAGE[:1]])
def test_own_images_of_several_types_or_sizes_are_refused(image: torch.Tensor) -> None:
    train = opened(Items([(IMAGE, 1), (image, 0)]), None).train
    with pytest.raises(
        UsageError, match=r"item 1 of the training set .* is \(Tensor of .*one type and size"
    ):
        train[1]


@pytest.mark.parametrize("labels", [[0.0, 1.0], [0, -1], [1, 2**40]])
def test_own_labels_in_memory_are_checked_as_a_whole(labels: list[Any]) -> None:
    """Labels that only the validation set has are wrong too."""
    wrong = TensorDataset(IMAGES, torch.tensor(labels))
    good = TensorDataset(IMAGES, torch.tensor([0, 1]))
    larger = TensorDataset(IMAGES, torch.tensor([1, 2]))
    for which, train, val in (
        ("training", wrong, None),
        ("validation", good, wrong),
        ("validation", good, larger),
    ):
        with pytest.raises(UsageError, match=f"of the {which} set of --data mine:data is"):
            opened(train, val)


@pytest.mark.parametrize(
    ("name", "cls", "labels"),
    [("cifar10", CIFAR10, "labels"), ("cifar100", CIFAR100, "fine_labels")],
)
def test_cifar_has_its_images_and_labels(
    name: str, cls: type[CIFAR10], labels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR-100 has its fine labels; a damaged file is refused."""
    root = Path("cifar")
    cifar.unpack(cifar.publish(name, Path("web"), monkeypatch), root)
    data = sources.open_data(DataConfig(data=name, data_dir=root), 0)
    assert (len(data.train), len(data.val)) == (cifar.NUM_TRAIN, cifar.NUM_TEST)
    assert data.classes == tuple(f"class {number}" for number in range(cifar.CLASSES[name]))
    first = root / cls.base_folder / cls.train_list[0][0]
    batch = pickle.loads(first.read_bytes())  # written by this test
    expected = torch.from_numpy(np.reshape(batch["data"], (-1, 3, 32, 32)))
    assert torch.equal(data.train.images[: len(expected)], expected)
    assert data.train.labels[: len(expected)].tolist() == batch[labels]
    content = bytearray(first.read_bytes())
    content[2000] ^= 1
    first.write_bytes(content)
    with pytest.raises(UsageError, match=f"--data {name}: not found whole in"):
        sources.open_data(DataConfig(data=name, data_dir=root), 0)


def test_one_of_many_ranks_downloads_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = cifar.publish("cifar10", Path("web"), monkeypatch)
    fetched = []

    def fetch(url: str, root: Path, **_: str) -> None:
        fetched.append(url)
        cifar.unpack(archive, root)

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fetch)
    config = DataConfig(data="cifar10", data_dir=Path("shared"), download=True)
    with ThreadPoolExecutor(3) as ranks:
        counts = [*ranks.map(lambda _: len(sources.open_data(config, 0).train), range(3))]
    assert (counts, fetched) == ([cifar.NUM_TRAIN] * 3, [CIFAR10.url])
