"""Data sets by name, and those of the user."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10, CIFAR100

from hvd_train.data import sources
from hvd_train.data.dataset import Arrays
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig
from tests.support import cifar
from tests.support.batches import RandomItems


def test_the_digits_are_scikit_learns() -> None:
    """Images and labels are those of `load_digits`, and any seed leaves the same 360 images to evaluate on."""
    data, other = (sources.open_data(DataConfig(data="digits"), seed=seed) for seed in (0, 1))
    raw: Any = load_digits()
    shuffled = np.random.default_rng(1998).permutation(len(raw.target))
    for part, rows in ((data.val, shuffled[:360]), (data.train, shuffled[360:]), (other.val, shuffled[:360])):
        assert isinstance(part, Arrays)
        expected = (raw.images[rows] * (255 / 16)).round().astype(np.uint8)
        assert torch.equal(part.images, torch.from_numpy(expected).unsqueeze(1))
        assert torch.equal(part.labels, torch.from_numpy(raw.target[rows]))
    assert isinstance(data.train, Arrays)
    assert len(data.classes) == 10
    values = data.train.images.float() / 255
    assert (values.mean().item(), values.std().item()) == pytest.approx((data.mean[0], data.std[0]), abs=0.002)


def test_own_tensors_are_kept_in_memory() -> None:
    """A pair of TensorDatasets is kept in memory, with class names that follow from the labels."""
    images, labels = torch.rand(6, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32)
    data = sources.open_data(DataConfig(), 0, own=lambda config: (TensorDataset(images, labels), None))
    assert isinstance(data.train, Arrays)
    assert data.classes == ("0", "1", "2")
    assert data.train.labels.dtype == torch.int64
    assert data.val is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "it must return"),
        ((None, None), "it must return"),
        ((RandomItems(), None), "needs an attribute `classes`"),
        ((TensorDataset(torch.zeros(0, 1, 2, 2), torch.zeros(0)), None), "there are no training images"),
    ],
)
def test_own_data_of_another_form_are_refused(result: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sources.open_data(DataConfig(), 0, own=lambda config: result)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_images_and_labels_of_cifar_are_those_of_the_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images are planes of 32 x 32 pixels; the labels of CIFAR-100 are the fine ones; a damaged file is refused."""
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
    assert torch.equal(data.train.images[: len(expected)], expected)
    labels = batch["labels" if name == "cifar10" else "fine_labels"]
    assert data.train.labels[: len(expected)].tolist() == labels
    content = bytearray(first.read_bytes())
    content[2000] ^= 1
    first.write_bytes(content)
    with pytest.raises(UsageError, match=rf"--data {name}: not found whole in .*add --download"):
        sources.open_data(DataConfig(data=name, data_dir=tmp_path), seed=0)


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
