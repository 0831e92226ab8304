"""Archives of a small CIFAR of noise, in the published format
(https://www.cs.toronto.edu/~kriz/cifar.html).
"""

import hashlib
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100

CLASSES = {"cifar10": 10, "cifar100": 100}
NUM_TRAIN = 100
NUM_TEST = 20


def publish(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small CIFAR, which torchvision takes for the published one;
    return the archive's path.
    """
    cls = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    tree = folder / cls.base_folder
    tree.mkdir(parents=True)
    draw = np.random.default_rng(0)
    lists = []
    for listed, count in (
        (cls.train_list, NUM_TRAIN // len(cls.train_list)),
        (cls.test_list, NUM_TEST),
    ):
        lists.append([[file, _write(tree / file, _batch(name, count, draw))] for file, _ in listed])
    names = [f"class {number}" for number in range(CLASSES[name])]
    meta = {**cls.meta, "md5": _write(tree / cls.meta["filename"], {cls.meta["key"]: names})}
    archive = folder / cls.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree, arcname=cls.base_folder)
    digest = hashlib.md5(archive.read_bytes()).hexdigest()  # torchvision's choice
    published = {"train_list": lists[0], "test_list": lists[1], "meta": meta, "tgz_md5": digest}
    for attribute, value in published.items():
        monkeypatch.setattr(cls, attribute, value)
    return archive


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(folder)  # our own archive


def _batch(name: str, count: int, draw: np.random.Generator) -> dict[str, Any]:
    fine = draw.integers(0, CLASSES[name], count).tolist()
    labels = {"labels": fine} if name == "cifar10" else {"fine_labels": fine, "coarse_labels": fine}
    return {"data": draw.integers(0, 256, (count, 3072), dtype=np.uint8), **labels}


def _write(path: Path, value: dict[str, Any]) -> str:
    path.write_bytes(pickle.dumps(value, protocol=2))
    return hashlib.md5(path.read_bytes()).hexdigest()  # torchvision's choice
