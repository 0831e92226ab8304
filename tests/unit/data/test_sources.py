"""Data sets by name, and those of the user."""

from __future__ import annotations

import importlib.util
import math
import pickle
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10, CIFAR100

from hvd_train.data import sources
from hvd_train.data.dataset import Arrays
from hvd_train.data.folder import ImageFolder
from hvd_train.data.pictures import Picture
from hvd_train.data.views import CenterCrop
from hvd_train.errors import UsageError
from hvd_train.run import train
from hvd_train.settings.data import DataConfig
from tests.support import cifar, jpegs
from tests.support.runs import small_config


@pytest.mark.parametrize("where", ["in its file", "elsewhere"])
def test_the_digits_are_scikit_learns(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and labels are those of `load_digits`, whether its file is read or, where that is absent, it is called."""
    if where == "elsewhere":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    data = sources.open_data(DataConfig(data="digits"), seed=0)
    raw: Any = load_digits()
    shuffled = np.random.default_rng(1998).permutation(len(raw.target))
    for part, rows in ((data.val, shuffled[:360]), (data.train, shuffled[360:])):
        assert isinstance(part, Arrays)
        expected = (raw.images[rows] * (255 / 16)).round().astype(np.uint8)
        assert torch.equal(part.inputs, torch.from_numpy(expected).unsqueeze(1))
        assert torch.equal(part.targets, torch.from_numpy(raw.target[rows]))


def test_digits_are_split_the_same_whatever_the_seed() -> None:
    """Any seed leaves the same 360 images to evaluate on and 1,437 others to train on, of ten classes."""
    first, second = (sources.open_data(DataConfig(data="digits"), seed=seed) for seed in (0, 1))
    assert isinstance(first.val, Arrays)
    assert isinstance(second.val, Arrays)
    assert (len(first.train), len(first.val), len(first.classes)) == (1437, 360, 10)
    assert torch.equal(first.val.inputs, second.val.inputs)
    assert isinstance(first.train, Arrays)
    seen = {image.numpy().tobytes() for image in first.train.inputs}
    assert sum(image.numpy().tobytes() in seen for image in first.val.inputs) == 0
    values = first.train.inputs.float() / 255
    assert (values.mean().item(), values.std().item()) == pytest.approx((first.mean[0], first.std[0]), abs=0.002)


def test_an_unknown_data_set_is_answered_with_the_nearest() -> None:
    """The error names the nearest data set."""
    with pytest.raises(UsageError, match="unknown data set 'cifar1'; did you mean 'cifar10'"):
        sources.check_name("cifar1")


def test_cifar_that_is_not_there_says_what_to_type() -> None:
    """CIFAR that is absent is neither a traceback nor a download that nobody asked for, but a line of advice."""
    with pytest.raises(UsageError, match=r"--data cifar10: not found whole in data .*add --download"):
        sources.open_data(DataConfig(data="cifar10"), seed=0)


def test_own_tensors_are_kept_in_memory() -> None:
    """A pair of TensorDatasets is kept in memory, with class names that follow from the labels."""
    images, labels = torch.rand(6, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32)
    data = sources.open_data(DataConfig(), 0, own=lambda config: (TensorDataset(images, labels), None))
    assert isinstance(data.train, Arrays)
    assert data.classes == ("0", "1", "2")
    assert data.train.targets.dtype == torch.int64
    assert data.val is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "it must return"),
        ((None, None), "it must return"),
        ((TensorDataset(torch.zeros(0, 1, 2, 2), torch.zeros(0)), None), "there are no training images"),
    ],
)
def test_own_data_of_another_form_are_refused(result: object, message: str) -> None:
    """One line says what the function of the user must return."""
    with pytest.raises(UsageError, match=message):
        sources.open_data(DataConfig(), 0, own=lambda config: result)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_images_and_labels_of_cifar_are_those_of_the_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images are planes of 32 x 32 pixels, red, green and blue; the labels of CIFAR-100 are the fine ones."""
    cifar.unpack(cifar.publish(name, tmp_path / "web", monkeypatch), tmp_path)
    data = sources.open_data(DataConfig(data=name, data_dir=tmp_path), seed=0)
    assert isinstance(data.train, Arrays)
    assert isinstance(data.val, Arrays)
    assert (len(data.train), len(data.val)) == (cifar.NUM_TRAIN, cifar.NUM_TEST)
    assert data.classes == tuple(f"class {number}" for number in range(cifar.CLASSES[name]))
    cls = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    first = tmp_path / cls.base_folder / cls.train_list[0][0]
    batch = pickle.loads(first.read_bytes())  # written by this test
    expected = torch.from_numpy(np.reshape(batch["data"], (-1, 3, 32, 32)))
    assert torch.equal(data.train.inputs[: len(expected)], expected)
    labels = batch["labels" if name == "cifar10" else "fine_labels"]
    assert data.train.targets[: len(expected)].tolist() == labels


def test_a_damaged_file_of_cifar_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of CIFAR with a flipped bit is refused by its checksum."""
    cifar.unpack(cifar.publish("cifar10", tmp_path / "web", monkeypatch), tmp_path)
    path = tmp_path / CIFAR10.base_folder / "data_batch_3"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"--data cifar10: not found whole in .*add --download"):
        sources.open_data(DataConfig(data="cifar10", data_dir=tmp_path), seed=0)


def test_one_of_many_ranks_downloads_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a host share the folder: one downloads, the others wait and read what it has downloaded."""
    archive = cifar.publish("cifar10", tmp_path / "web", monkeypatch)
    alone, shared = (
        DataConfig(data="cifar10", data_dir=tmp_path / folder, download=True) for folder in ("alone", "shared")
    )
    counts: list[int] = []
    ranks = [threading.Thread(target=lambda: counts.append(len(sources.open_data(shared, 0).train))) for _ in range(3)]
    with cifar.served(archive, monkeypatch) as requests:
        sources.open_data(alone, 0)
        of_one_download = len(requests)
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert counts == [cifar.NUM_TRAIN] * 3
    assert len(requests) == 2 * of_one_download > 0, requests


def test_cifar_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of torchvision trains on the images of CIFAR-10 as they are."""
    cifar.unpack(cifar.publish("cifar10", tmp_path / "web", monkeypatch), tmp_path)
    result = train(small_config(data="cifar10", data_dir=tmp_path, model="resnet18", epochs=1))
    assert (result.finished, result.steps) == (True, 5)
    assert not math.isnan(result.scores["top1"])


@pytest.mark.parametrize("augment", ["standard", "trivial"])
def test_digits_to_be_evaluated_have_no_random_changes(augment: Literal["standard", "trivial"]) -> None:
    """The training set is the array of the file, whatever training does to it."""
    config = DataConfig(augment=augment)
    data = sources.unchanged(sources.open_data(config, seed=0), config)
    assert isinstance(data.train, Arrays)
    assert (len(data.train), data.augment) == (1437, None)


@pytest.mark.parametrize("augment", ["standard", "trivial"])
def test_files_to_be_evaluated_are_seen_as_those_of_validation(augment: Literal["standard", "trivial"]) -> None:
    """Each training image is the same each time: its middle, in the size that evaluation sees."""
    root = jpegs.digits(Path("images"), (0, 1), most=2)
    config = DataConfig(
        data="folder", data_dir=root, augment=augment, image_size=16, val_crop_size=20, val_resize_size=24
    )
    data = sources.unchanged(sources.open_data(config, seed=0), config)
    assert isinstance(data.train, ImageFolder)
    for index in range(len(data.train)):
        picture = Picture(data.train.path(index).read_bytes())
        assert torch.equal(data.train[index][0], CenterCrop(24, 20)(picture))
