"""Data sets of tar shards: what is refused, and shards that change or are many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_train import cli
from hvd_train.data import sources, webdataset
from hvd_train.data.webdataset import ShardImages
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig
from tests.support import jpegs, shards

CONFIG = DataConfig(data="webdataset", data_dir=Path("data"), image_size=16)
JPEG = jpegs.encoded(jpegs.noise(20, 20))


def sample(key: str, label: int) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", JPEG), (f"{key}.cls", str(label).encode())]


@pytest.fixture
def data() -> Path:
    """Return a folder with three training shards, of which the first has no images, and one for validation."""
    for number in range(3):
        files = [file for label in range(number) for file in sample(f"{number}-{label}", label)]
        shards.write(Path(f"data/train/{number}.tar"), files)
    shards.write(Path("data/val/0.tar"), sample("v", 2))
    assert cli.run(["index", "data"]) == 0
    return Path("data")


def test_classes_without_names_are_numbers(data: Path) -> None:
    """There are as many as the largest label of any split says."""
    found = sources.open_data(CONFIG, 0)
    assert found.classes == ("0", "1", "2")
    assert isinstance(found.train, ShardImages)
    assert [found.train.name(index) for index in range(3)] == [
        "1-0 in data/train/1.tar", "2-0 in data/train/2.tar", "2-1 in data/train/2.tar",
    ]  # fmt: skip
    assert [found.train[index][1] for index in range(3)] == [0, 0, 1]


def test_a_training_may_have_more_shards_than_files_may_be_open(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not read for longest is closed first."""
    monkeypatch.setattr(webdataset, "_MOST_OPEN", 1)
    train = sources.open_data(CONFIG, 0).train
    assert isinstance(train, ShardImages)
    before = len(os.listdir("/proc/self/fd"))
    for index in (0, 1, 0, 2, 0):
        assert train.read(index) == JPEG
    assert len(os.listdir("/proc/self/fd")) == before + 1


def test_a_shard_that_changes_under_a_training_ends_it(data: Path) -> None:
    """The error names the shard, and what to type."""
    train = sources.open_data(CONFIG, 0).train
    os.utime("data/train/2.tar", ns=(5, 5))
    train[0]  # type: ignore[index]  # of another one
    with pytest.raises(
        UsageError, match=r"the shard data/train/2.tar has changed .*type `hvd-train index data/train/2"
    ):
        train[1]  # type: ignore[index]
    os.truncate("data/train/1.tar", 600)  # while it is open
    with pytest.raises(UsageError, match=r"cannot read the image 1-0 in .*1.tar: the shard has become shorter"):
        train[0]  # type: ignore[index]


def without_index(data: Path) -> None:
    for path in data.glob("train/*.index"):
        path.unlink()


def without_val(data: Path) -> None:
    (data / "val").rename(data / "elsewhere")


def compressed(data: Path) -> None:
    without_val(data)
    (data / "val-0.tar.gz").touch()


def without_images(data: Path) -> None:
    shards.write(data / "val/0.tar", [])
    assert cli.run(["index", str(data)]) == 0


def few_classes(data: Path) -> None:
    (data / "classes.txt").write_text("a\nb\n")


FAULTS = {
    without_index: r"data/train/0.tar and 2 more have no index: type `hvd-train index data` once",
    without_val: r"data has no val/\*.tar and no val-\*.tar$",
    compressed: r"no val/\*.tar.* those that are compressed, as val-0.tar.gz, must be unpacked to .tar",
    without_images: "data: its val shards hold no images",
    few_classes: "the shard data/val/0.tar cannot be used: v has the label 2; those of 2 classes are 0 to 1",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_cannot_be_trained_on_is_refused(data: Path, fault: object) -> None:
    """One line says what is missing or wrong, and what to type."""
    fault(data)  # type: ignore[operator]
    with pytest.raises(UsageError, match=FAULTS[fault]) as caught:  # type: ignore[index]
        sources.open_data(CONFIG, 0)
    assert "\n" not in str(caught.value)
