"""`hvd-train write-shards`: what it writes is read back, after a kill, too; other input is one
line.
"""

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from torch import Tensor

from hvd_train import cli
from hvd_train.config import DataConfig
from hvd_train.data.shards import Shards
from hvd_train.data.sources import open_data
from tests.support.jpegs import encoded, noise

FORMATS = ("wds", "mds")
SMALL = ("--shard-size", "600")  # a few samples of `drawn` in MDS, one in a tar file


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


def written(
    monkeypatch: pytest.MonkeyPatch, train: Any, *flags: str, val: Any = None, out: str = "out"
) -> int:
    """Write data of the user's own function, and return the exit code."""
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(data=lambda: (train, val)))  # type: ignore[arg-type]
    return cli.run(["write-shards", "mine:data", out, *flags])


def content_of(folder: str) -> dict[str, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def class_folders() -> list[tuple[bytes, int]]:
    """Write images of two classes, and return their contents and classes."""
    found = []
    for number, name in enumerate(("cat/1.a.jpg", "cat/2.PNG", "dog/1.jpeg")):
        content = encoded(noise(9, 6 + number), "png" if number == 1 else "jpeg")
        for part in ("train", "val"):
            path = Path("images", part, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        found.append((content, number // 2))
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_image_files_are_copied_in_their_order(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--data shards:OUT` has the images and classes of `--data folder`."""
    stored = class_folders()
    assert cli.run(["write-shards", "images", "out", "--format", kind]) == 0
    assert (
        capsys.readouterr().out == "out: val: 3 samples in 1 shard, train: 3 samples in 1 shard\n"
    )
    samples = Shards("out/train", decode=dict)
    for number, (content, label) in enumerate(stored):
        assert content in [*samples[number].values()]
        assert Shards("out/val")[number]["cls"] == label
    data = open_data(DataConfig(data="shards:out", image_size=4), 0)
    same = open_data(DataConfig(data="folder", data_dir=Path("images"), image_size=4), 0)
    assert data.classes == same.classes == ("cat", "dog")
    assert data.val is not None
    assert same.val is not None
    for number in range(3):
        assert torch.equal(data.val[number][0], same.val[number][0])
    assert not Path("out.unfinished").exists()


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


@pytest.mark.parametrize("kind", FORMATS)
def test_values_come_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images to the pixel, arrays with their types; each kind of value has an encoding."""
    assert written(monkeypatch, Items(3, values), "--format", kind, "--shard-size", "2KB") == 0
    shards = Shards("out/train")
    assert len(shards) == 3
    for number in range(3):
        item = shards[number]
        item.pop("__key__", None)
        assert " ".join(item) == EXPECTED[kind]
        image, label, a, b, target, text, raw, f, j, grey = item.values()
        assert torch.equal(image, values(number)["image"])
        assert (label, float(target), text, f) == (number, number / 2, f"é{number}", number / 4)
        assert torch.equal(a, values(number)["a"])
        assert (a.dtype, b.dtype, b.tolist()) == (torch.float16, torch.int16, [0, 1, 2])
        assert (raw, j) == (b"b" * number, {"i": [number, None, True]})
        assert grey.tolist() == [[[number] * 2]] * 3


@pytest.mark.parametrize("kind", FORMATS)
def test_own_images_and_class_numbers_train(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of their classes come along; values of other tuples have numbers."""

    def pair(number: int) -> tuple[Tensor, Tensor]:
        return torch.full((3, 4, 4), number, dtype=torch.uint8), torch.tensor(number % 2)

    train = Items(4, pair, classes=["cat", "dog"])
    assert written(monkeypatch, train, "--format", kind) == 0
    data = open_data(DataConfig(data="shards:out", image_size=4, augment="none"), 0)
    assert (len(data.train), data.val, data.classes) == (4, None, ("cat", "dog"))
    image, label = data.train[3]
    assert (image.unique().tolist(), label) == ([3], 1)
    triples = Items(2, lambda number: (number, "a", [number]))
    assert written(monkeypatch, triples, "--format", kind, out="triples") == 0
    item = Shards("triples/train")[1]
    assert [value for name, value in item.items() if name != "__key__"] == [1, "a", [1]]


def drawn(number: int) -> dict[str, Any]:
    return {"cls": number, "x": torch.rand(number + 1)}


@pytest.mark.parametrize("kind", FORMATS)
def test_after_a_kill_the_same_command_continues(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the same bytes as one that was not killed, and no training takes a part."""
    flags = ("--format", kind, *SMALL)
    assert written(monkeypatch, Items(40, drawn), *flags, val=Items(9, drawn), out="whole") == 0
    # the command looks at the last item before it writes; two kills are in the same shard
    for place in (17, 17, 30):
        monkeypatch.setattr(Items, "kill", place)
        arguments = (monkeypatch, Items(40, drawn), *flags)
        killed = multiprocessing.get_context("fork").Process(
            target=written, args=arguments, kwargs={"val": Items(9, drawn)}
        )
        killed.start()
        killed.join()
        assert (killed.exitcode, Path("out").exists()) == (-9, False)
    monkeypatch.setattr(Items, "kill", -1)
    kept = {
        name: os.stat(Path("out.unfinished", name)).st_ino for name in content_of("out.unfinished")
    }
    assert written(monkeypatch, Items(40, drawn), *flags, val=Items(9, drawn)) == 0
    assert content_of("out") == content_of("whole")
    shards = [name for name in kept if name.endswith((".tar", f".{kind}"))]
    assert len(shards) > 3
    assert all(os.stat(Path("out", name)).st_ino == kept[name] for name in shards)
    assert [item["cls"] for item in Shards("out/train")] == [*range(40)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_lost_shard_is_written_again(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it would be another one."""
    flags = ("--format", kind, *SMALL)
    assert written(monkeypatch, Items(40, drawn), *flags) == 0
    before = content_of("out")
    _, second, third, *_ = sorted(
        path for path in Path("out/train").iterdir() if "shard" in path.name
    )
    second.unlink()
    os.truncate(third, 1000)
    assert written(monkeypatch, Items(40, drawn), *flags) == 0
    assert content_of("out") == before
    third.unlink()
    changed = Items(40, lambda number: drawn(400 * (number in range(1, 19)) + number))
    assert written(monkeypatch, changed, *flags) == 2
    assert "cannot be written again: the data has changed" in capsys.readouterr().err
    assert not third.exists()


def test_other_options_or_data_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They never mix with shards that are there, in a whole folder or an unfinished one."""
    assert written(monkeypatch, Items(9, drawn)) == 0
    before = content_of("out")
    changes = {
        "--format was wds, now it is mds": (Items(9, drawn), "--format", "mds"),
        "--shard-size was 256,000,000, now": (Items(9, drawn), "--shard-size", "4KB"),
        "the train set was 9 samples, digest": (Items(10, drawn),),
        "the train set was": (Items(9, lambda number: number),),
    }
    for folder in ("out", "out.unfinished"):
        for says, (train, *flags) in changes.items():
            capsys.readouterr()
            assert written(monkeypatch, train, *flags) == 2
            printed = capsys.readouterr().err
            assert f"{folder} has shards of other options or data: {says}" in printed
            assert printed.count("\n") == 1
            assert content_of(folder) == before
        if folder == "out":
            shutil.move("out", "out.unfinished")


def test_a_folder_of_others_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    Path("out/mine").touch()
    assert written(monkeypatch, Items(2, drawn)) == 2
    assert "out is there, and write-shards has not made it" in capsys.readouterr().err
    assert [*map(str, Path("out").iterdir())] == ["out/mine"]


def test_two_processes_do_not_write_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileLock("out.lock"):
        assert written(monkeypatch, Items(2, drawn)) == 2
    assert "/out: wait for it" in capsys.readouterr().err
    assert written(monkeypatch, Items(2, drawn)) == 0


WRONG: list[tuple[str, Any, str]] = [
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
    kind: str,
    item: Any,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    items = Items(2, lambda number: item if number else {"x": 0})
    assert written(monkeypatch, items, "--format", kind) == 2
    printed = capsys.readouterr().err
    assert says in printed
    assert printed.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.slow
def test_webdataset_reads_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    webdataset = pytest.importorskip("webdataset")
    assert written(monkeypatch, Items(3, values), "--shard-size", "8KB") == 0
    urls = sorted(map(str, Path("out/train").glob("*.tar")))
    items = [*webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8")]
    for number, item in enumerate(items):
        assert np.array_equal(item["png"], values(number)["image"].permute(1, 2, 0))
        assert np.array_equal(item["a.npy"], values(number)["a"])
        found = [item[name] for name in ("cls", "text.txt", "f.json", "j.json", "raw.bin")]
        assert found == [values(number)[name] for name in ("cls", "text", "f", "j", "raw")]
    assert len(items) == 3


@pytest.mark.slow
def test_streaming_reads_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    streaming = pytest.importorskip("streaming")
    assert written(monkeypatch, Items(3, values), "--format", "mds", "--shard-size", "2KB") == 0
    items = streaming.StreamingDataset(local="out/train", batch_size=1)
    for number in range(3):
        item = items[number]
        assert np.array_equal(np.asarray(item["image"]), values(number)["image"].permute(1, 2, 0))
        assert np.array_equal(item["a"], values(number)["a"])
        names = ("cls", "text", "f", "j", "raw", "target")
        assert [item[name] for name in names] == [values(number)[name] for name in names]
    assert len(items) == 3
