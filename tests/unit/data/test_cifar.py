"""CIFAR-10 and CIFAR-100 from files in their published format."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, CIFAR100

from hvd_train.config import DataConfig
from hvd_train.data import sources
from hvd_train.data.dataset import Arrays
from hvd_train.errors import UsageError
from hvd_train.run import train
from tests.support import cifar
from tests.support.runs import small_config


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_images_and_labels_are_those_of_the_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red, green and blue planes of 32 x 32, rows first; the fine labels of CIFAR-100."""
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


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit is not trained on."""
    cifar.unpack(cifar.publish("cifar10", tmp_path / "web", monkeypatch), tmp_path)
    path = tmp_path / CIFAR10.base_folder / "data_batch_3"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"--data cifar10: not found whole in .*add --download"):
        sources.open_data(DataConfig(data="cifar10", data_dir=tmp_path), seed=0)


def test_one_of_many_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a host share the folder: one fetches, the others wait and read what it fetched."""
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
    """A network of torchvision takes its images as they come."""
    cifar.unpack(cifar.publish("cifar10", tmp_path / "web", monkeypatch), tmp_path)
    result = train(small_config(data="cifar10", data_dir=tmp_path, model="resnet18", epochs=1))
    assert (result.finished, result.steps) == (True, 5)
    assert result.top1 is not None
