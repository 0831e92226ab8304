"""Data sets by name, and data sets of the user."""

import pickle
import threading
from functools import partial
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
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.errors import UsageError
from tests.support import cifar


def test_the_digits_are_scikit_learns() -> None:
    """Any seed leaves the same 360 images for validation."""
    data, other = (sources.open_data(DataConfig(data="digits"), seed=seed) for seed in (0, 1))
    raw: Any = load_digits()
    shuffled = np.random.default_rng(1998).permutation(len(raw.target))
    for part, rows in (
        (data.val, shuffled[:360]),
        (data.train, shuffled[360:]),
        (other.val, shuffled[:360]),
    ):
        expected = (raw.images[rows] * (255 / 16)).round().astype(np.uint8)
        assert torch.equal(part.images, torch.from_numpy(expected).unsqueeze(1))
        assert torch.equal(part.labels, torch.from_numpy(raw.target[rows]))
    assert isinstance(data.train, Arrays)
    assert len(data.classes) == 10


IMAGE = torch.zeros(3, 4, 4)


class Items(list[Any]):
    """A data set with two classes."""

    classes = ("a", "b")


def opened(*parts: Any) -> DataSet:
    return sources.open_data(DataConfig(data="mine:data"), 0, own=lambda config: parts)


def test_files_become_images_as_in_own_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the transform of the validation set, or by the size of images of
    bytes; other data are refused.
    """
    parts = Items([(IMAGE, 0)]), Subset(Items([(IMAGE, 0)]), [0])
    monkeypatch.setattr("hvd_train.plugin.load", lambda *_: lambda config: parts)
    Image.new("RGB", (8, 6), (255, 0, 0)).save(tmp_path / "red.png")
    of_files = partial(
        sources.of_files, DataConfig(data="mine:data"), [tmp_path / "red.png"], ("a", "b")
    )
    with pytest.raises(UsageError, match="not known how it makes an image of a file: give its"):
        of_files()
    parts[1].dataset.transform = lambda image: torch.full((3, 4, 4), image.width)
    assert torch.equal(of_files().val[0][0], torch.full((3, 4, 4), 8))
    # its files are not read
    cifar10 = sources.of_files(DataConfig(data="cifar10"), [tmp_path / "red.png"], ("a", "b"))
    assert cifar10.val[0][0].shape == (3, 32, 32)
    parts = Items([(torch.zeros(1, 5, 4, dtype=torch.uint8), 0)]), None
    image = of_files().val[0][0]
    assert (image.dtype, image.shape, int(image[0, 0, 0])) == (torch.uint8, (1, 5, 4), 76)


def test_own_labels_may_be_integers_of_any_type() -> None:
    """As a number, a scalar, or a tensor with one element; in memory they become int64."""
    for labels in (
        np.array([0, 1], dtype=np.uint16),
        [False, True],
        torch.tensor([0, 1]).int(),
        torch.tensor([[0], [1]]),
    ):
        data = opened(Items((IMAGE, label) for label in labels), Items([(IMAGE, labels[1])])).train
        assert [(data[index][1], type(data[index][1])) for index in range(2)] == [
            (0, int),
            (1, int),
        ]
        if isinstance(labels, torch.Tensor):
            data = opened(TensorDataset(torch.stack([IMAGE] * 2), labels), None)
            assert isinstance(data.train, Arrays)
            assert (data.classes, data.train.labels.dtype) == (("0", "1"), torch.int64)
            assert data.train.labels.tolist() == [0, 1]


def test_attributes_of_a_tensor_data_set_are_kept() -> None:
    """--sample-weights and --length-buckets may name them."""
    data = TensorDataset(torch.stack([IMAGE] * 2), torch.tensor([0, 1]))
    data.weights = [1.0, 3.0]
    owners = [
        each for each in sources.inner_sets(opened(data, None).train) if hasattr(each, "weights")
    ]
    assert owners == [data]


def test_classes_of_own_data_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Their names save the reading of all items, also of a set that was split."""
    plain = [(IMAGE, 0), (IMAGE, 2)]
    counted = opened(plain, None)
    assert (counted.classes, counted.channels) == (("0", "1", "2"), 3)
    assert opened([(IMAGE[:1], 0)], None).channels == 1
    assert "--data mine:data: reading all labels to count the classes" in capsys.readouterr().err
    assert opened(Subset(Items([(IMAGE, 0), (IMAGE, 1)]), [0]), None).classes == ("a", "b")
    assert capsys.readouterr().err == ""
    with pytest.raises(
        UsageError, match=r"item 1 of the training set .* is .* str\); return .* from 0"
    ):
        opened([(IMAGE, 0), (IMAGE, "cat")], None)


@pytest.mark.parametrize(
    "wrong",
    [
        *((IMAGE, label) for label in (torch.tensor(1.0), [0, 1], 2, 2**70, np.int8(-1))),
        (IMAGE.numpy(), 0),
    ],
)
def test_own_items_of_another_form_are_named(wrong: object) -> None:
    """Item 0 is checked at once, other items when they are read."""
    good = (IMAGE, 1)
    for which, parts in (
        ("training", (Items([wrong]), None)),
        ("validation", (Items([good]), Items([wrong]))),
    ):
        with pytest.raises(
            UsageError, match=rf"item 0 of the {which} set of --data mine:data is .*below 2.*\Z"
        ):
            opened(*parts)
    items = Items([good, good, wrong])
    with pytest.raises(UsageError, match="item 2 of the training set"):
        opened(items, None).train[2]
    for image in (IMAGE.double(), IMAGE[:1]):
        with pytest.raises(
            UsageError, match=r"item 1 of the training set .* is \(Tensor of .*one type and size"
        ):
            opened(Items([good, (image, 0)]), None).train[1]


@pytest.mark.parametrize("labels", [[0.0, 1.0], [0, -1], [1, 2**40]])
def test_own_labels_in_memory_are_checked_as_a_whole(labels: list[Any]) -> None:
    """Labels that only the validation set has are wrong too."""
    images = torch.rand(2, 3)
    good = torch.tensor([0, 1])
    with pytest.raises(UsageError, match="of the training set of --data mine:data is"):
        opened(TensorDataset(images, torch.tensor(labels)), None)
    for others in (torch.tensor(labels), torch.tensor([1, 2])):
        with pytest.raises(UsageError, match="of the validation set of --data mine:data is"):
            opened(TensorDataset(images, good), TensorDataset(images, others))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_has_its_images_and_labels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR-100 has its fine labels; a damaged file is refused."""
    cifar.unpack(cifar.publish(name, tmp_path / "web", monkeypatch), tmp_path)
    data = sources.open_data(DataConfig(data=name, data_dir=tmp_path), seed=0)
    assert isinstance(data.train, Arrays)
    assert (len(data.train), len(data.val)) == (cifar.NUM_TRAIN, cifar.NUM_TEST)
    assert data.classes == tuple(f"class {number}" for number in range(cifar.CLASSES[name]))
    cls = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    first = tmp_path / cls.base_folder / cls.train_list[0][0]
    batch = pickle.loads(first.read_bytes())  # written by this test
    expected = torch.from_numpy(np.reshape(batch["data"], (-1, 3, 32, 32)))
    assert torch.equal(data.train.images[: len(expected)], expected)
    labels = batch["labels" if name == "cifar10" else "fine_labels"]
    assert data.train.labels[: len(expected)].tolist() == labels
    content = bytearray(first.read_bytes())
    content[2000] ^= 1
    first.write_bytes(content)
    with pytest.raises(UsageError, match=rf"--data {name}: not found whole in .*add --download"):
        sources.open_data(DataConfig(data=name, data_dir=tmp_path), seed=0)


def test_one_of_many_ranks_downloads_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = cifar.publish("cifar10", tmp_path / "web", monkeypatch)
    fetched = list[str]()

    def fetch(url: str, root: Path, **_: str) -> None:
        fetched.append(url)
        cifar.unpack(archive, root)

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fetch)
    config = DataConfig(data="cifar10", data_dir=tmp_path / "shared", download=True)
    counts = list[int]()
    ranks = [
        threading.Thread(target=lambda: counts.append(len(sources.open_data(config, 0).train)))
        for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert (counts, fetched) == ([cifar.NUM_TRAIN] * 3, [CIFAR10.url])
