"""The cores that a GPU's images take."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import recipes
from hvd_train.bench import readers
from hvd_train.config import Config
from hvd_train.data.sources import open_data
from hvd_train.errors import UsageError
from tests.support.jpegs import encoded, noise


@pytest.fixture
def folder(tmp_path: Path) -> Config:
    """Return the config of a training from four photographs."""
    for path in (tmp_path / split / "a" / f"{number}.jpg" for split in ("train", "val") for number in range(4)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(noise(500, 375), quality=90))
    return recipes.get("digits").replace(
        data="folder", data_dir=tmp_path, image_size=224, global_batch_size=2, device="cpu"
    )


def measured(config: Config, seconds: float) -> dict[str, float]:
    return readers.cores_for_a_gpu(config, open_data(config.data, config.seed).train, seconds)


def test_a_gpu_that_decodes_takes_fewer_cores(folder: Config) -> None:
    """Both ways are measured where there is no GPU; to read a file takes less than half."""
    found = measured(folder, seconds=0.2)
    assert 0 < found["gpu"] < found["cpu"] / 2


def test_only_what_can_be_typed_is_measured(folder: Config) -> None:
    """Random changes to single images do not go with a GPU that decodes, and other data have no files."""
    assert list(measured(folder.replace(augment="trivial"), seconds=0.01)) == ["cpu"]
    assert measured(recipes.get("digits"), seconds=0.01) == {}


def test_a_damaged_file_is_named(folder: Config) -> None:
    """As in a training."""
    assert folder.data.data_dir is not None
    for path in folder.data.data_dir.glob("train/a/*"):
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match="cannot read the image"):
        measured(folder, seconds=0.01)
