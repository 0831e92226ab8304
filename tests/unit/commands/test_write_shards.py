"""`hvd-train write-shards`: what it writes is read back, after a kill, too; other input is one
line.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from hvd_train.config import DataConfig
from hvd_train.data.shards import Shards
from hvd_train.data.sources import open_data
from tests.support.jpegs import encoded, noise
from tests.unit.commands.conftest import Command

SMALL = "--shard-size 600"  # a few samples of `drawn` in MDS, one in a tar file
each_format = pytest.mark.parametrize("kind", ["wds", "mds"])


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Items:
    """A data set that `kill` ends the process at."""

    kill = -1

    def __init__(self, count: int, item: Callable[[int], Any], **attributes: Any) -> None:
        self.item = item
        self.count = count
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        if number == Items.kill:
            os.kill(os.getpid(), 9)
        return self.item(number)


@pytest.fixture
def write(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that writes data of the user's own function, and returns the errors."""

    def written(
        train: Items, flags: str = "", code: int = 0, *, val: Any = None, out: str = "out"
    ) -> str:
        monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(data=lambda: (train, val)))
        return command(f"write-shards mine:data {out} {flags}", code).err

    return written


def content_of(folder: str) -> dict[str, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@each_format
def test_image_files_are_copied_in_their_order(kind: str, command: Command) -> None:
    """`--data shards:OUT` has the images and classes of `--data folder`."""
    stored = {
        name: encoded(noise(9, height), "png" if height == 7 else "jpeg")
        for height, name in enumerate(("cat/1.a.jpg", "cat/2.PNG", "dog/1.jpeg"), 6)
    }
    for part in ("train", "val"):
        for name, content in stored.items():
            path = Path("images", part, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    printed = command(f"write-shards images out --format {kind}").out
    assert printed == "out: val: 3 samples in 1 shard, train: 3 samples in 1 shard\n"
    assert not Path("out.unfinished").exists()
    data = open_data(DataConfig(data="shards:out", image_size=4), 0)
    same = open_data(DataConfig(data="folder", data_dir=Path("images"), image_size=4), 0)
    assert data.classes == same.classes == ("cat", "dog")
    samples = Shards("out/train", decode=dict)
    for number, content in enumerate(stored.values()):
        assert content in [*samples[number].values()]
        assert Shards("out/val")[number]["cls"] == number // 2
        assert torch.equal(data.val[number][0], same.val[number][0])


def values(number: int) -> dict[str, Any]:
    return {
        "image": torch.arange(number, number + 12, dtype=torch.uint8).view(3, 2, 2),
        "cls": np.int64(number),
        "a": torch.full((number + 1, 2), 0.5, dtype=torch.float16),
        "b": np.arange(3, dtype=">i2"),
        "target": torch.tensor(number / 2),
        "text": f"é{number}",
        "raw": b"b" * number,
        "f": number / 4,
        "j": {"i": [number, None, True]},
        "grey": Image.new("L", (2, 1), number),
    }


EXPECTED = {
    "wds": "png cls a.npy b.npy target.npy text.txt raw.bin f.json j.json grey.png",
    "mds": "image cls a b target text raw f j grey",
}


def plain(values: Iterable[Any]) -> list[Any]:
    """Return tensors, arrays and numbers as lists and numbers of Python."""
    return [np.asarray(value).tolist() for value in values]


@each_format
def test_values_come_back(kind: str, write: Command) -> None:
    """Images to the pixel, arrays with their types; each kind of value has an encoding."""
    write(Items(3, values), f"--format {kind} --shard-size 2KB")
    shards = Shards("out/train")
    assert len(shards) == 3
    for number in range(3):
        item = shards[number]
        item.pop("__key__", None)
        assert " ".join(item) == EXPECTED[kind]
        *found, grey = item.values()
        *given, _ = values(number).values()
        assert plain(found) == plain(given)
        assert (found[2].dtype, found[3].dtype) == (torch.float16, torch.int16)
        assert grey.tolist() == [[[number] * 2]] * 3


@each_format
def test_own_images_and_class_numbers_train(kind: str, write: Command) -> None:
    """The names of their classes come along; values of other tuples have numbers."""
    pair = lambda number: (torch.full((3, 4, 4), number).byte(), torch.tensor(number % 2))  # noqa: E731
    write(Items(4, pair, classes=["cat", "dog"]), f"--format {kind}")
    data = open_data(DataConfig(data="shards:out", image_size=4, augment="none"), 0)
    assert (len(data.train), data.val, data.classes) == (4, None, ("cat", "dog"))
    image, label = data.train[3]
    assert (image.unique().tolist(), label) == ([3], 1)
    write(Items(2, lambda number: (number, "a", [number])), f"--format {kind}", out="triples")
    item = Shards("triples/train")[1]
    item.pop("__key__", None)
    assert [*item.values()] == [1, "a", [1]]


def drawn(number: int) -> dict[str, Any]:
    return {"cls": number, "x": torch.rand(number + 1)}


def shards_in(folder: str) -> dict[str, int]:
    """Return the names and inodes of shards; a shard that is written again has another inode."""
    paths = [*Path(folder, "train").glob("*.tar"), *Path(folder, "train").glob("*.mds")]
    return {path.name: path.stat().st_ino for path in paths}


@each_format
def test_after_a_kill_the_same_command_continues(
    kind: str, write: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the same bytes as one that was not killed, and no training takes a part."""
    arguments = Items(40, drawn), f"--format {kind} {SMALL}"
    val = {"val": Items(9, drawn)}
    write(*arguments, **val, out="whole")
    # the command looks at the last item before it writes; two kills are in the same shard
    for place in (17, 17, 30):
        monkeypatch.setattr(Items, "kill", place)
        killed = multiprocessing.get_context("fork").Process(
            target=write, args=arguments, kwargs=val
        )
        killed.start()
        killed.join()
        assert (killed.exitcode, Path("out").exists()) == (-9, False)
    monkeypatch.setattr(Items, "kill", -1)
    kept = shards_in("out.unfinished")
    assert len(kept) > 3
    write(*arguments, **val)
    assert content_of("out") == content_of("whole")
    assert kept.items() <= shards_in("out").items()
    assert [item["cls"] for item in Shards("out/train")] == [*range(40)]


@each_format
def test_a_lost_shard_is_written_again(kind: str, write: Command) -> None:
    """Unless it would be another one."""
    flags = f"--format {kind} {SMALL}"
    write(Items(40, drawn), flags)
    before = content_of("out")
    _, second, third, *_ = sorted(Path("out/train").glob("*shard*"))
    second.unlink()
    os.truncate(third, 1000)
    write(Items(40, drawn), flags)
    assert content_of("out") == before
    third.unlink()
    changed = Items(40, lambda number: drawn(400 * (number in range(1, 19)) + number))
    assert "cannot be written again: the data has changed" in write(changed, flags, 2)
    assert not third.exists()


def test_other_options_or_data_are_refused(write: Command) -> None:
    """They never mix with shards that are there, in a whole folder or an unfinished one."""
    write(Items(9, drawn))
    before = content_of("out")
    changes = {
        "--format was wds, now it is mds": (Items(9, drawn), "--format mds"),
        "--shard-size was 256,000,000, now": (Items(9, drawn), "--shard-size 4KB"),
        "the train set was 9 samples, digest": (Items(10, drawn), ""),
        "the train set was": (Items(9, lambda number: number), ""),
    }
    for folder in ("out", "out.unfinished"):
        Path("out").rename(folder)
        for says, (train, flags) in changes.items():
            printed = write(train, flags, 2)
            assert f"{folder} has shards of other options or data: {says}" in printed
            assert printed.count("\n") == 1
            assert content_of(folder) == before


def test_a_folder_of_others_is_left_alone(write: Command) -> None:
    Path("out").mkdir()
    Path("out/mine").touch()
    assert "out is there, and write-shards has not made it" in write(Items(2, drawn), code=2)
    assert [*content_of("out")] == ["mine"]


def test_two_processes_do_not_write_at_once(write: Command) -> None:
    with FileLock("out.lock"):
        assert "/out: wait for it" in write(Items(2, drawn), code=2)
    write(Items(2, drawn))


WRONG = [
    ("wds", {"x": {1, 2}}, "item 1: 'x' is set, which cannot be written (Object of type set"),
    ("mds", {"x": torch.zeros(2, dtype=torch.bfloat16)}, "cannot be written (Got unsupported"),
    ("wds", {"x": np.array(["a"])}, "(values of type <U1)"),
    ("wds", {"a/b": 1}, "(no file of a tar file can have this name)"),
    ("wds", {"A": 1, "a": 2}, "item 1: 'a' has the name of another in a tar file"),
    ("mds", {"x": np.zeros(2, bool)}, "(MDS has no such arrays)"),
    ("mds", {"x": np.zeros(0)}, "(MDS has no such arrays)"),
    ("mds", {"x": 10**20}, "(Python int too large"),
    ("mds", {"x": "text"}, "item 1 has {'x': 'str'}, and item 0 has {'x': 'int'}"),
]


@pytest.mark.parametrize(("kind", "item", "says"), WRONG)
def test_a_value_without_a_place_is_one_line(
    kind: str, item: Any, says: str, write: Command
) -> None:
    printed = write(Items(2, lambda number: item if number else {"x": 0}), f"--format {kind}", 2)
    assert says in printed
    assert printed.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.slow
def test_webdataset_reads_what_was_written(write: Command) -> None:
    webdataset = pytest.importorskip("webdataset")
    write(Items(3, values), "--shard-size 8KB")
    urls = sorted(map(str, Path("out/train").glob("*.tar")))
    items = [*webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8")]
    for item, given in zip(items, map(values, range(3)), strict=True):
        assert np.array_equal(item["png"], given["image"].permute(1, 2, 0))
        for name in ("cls", "a.npy", "text.txt", "f.json", "j.json", "raw.bin"):
            assert plain([item[name]]) == plain([given[name.partition(".")[0]]])


@pytest.mark.slow
def test_streaming_reads_what_was_written(write: Command) -> None:
    streaming = pytest.importorskip("streaming")
    write(Items(3, values), "--format mds --shard-size 2KB")
    items = streaming.StreamingDataset(local="out/train", batch_size=1)
    assert len(items) == 3
    for number in range(3):
        item = items[number]
        given = values(number)
        assert np.array_equal(np.asarray(item["image"]), given["image"].permute(1, 2, 0))
        for name in ("cls", "a", "text", "f", "j", "raw", "target"):
            assert plain([item[name]]) == plain([given[name]])
