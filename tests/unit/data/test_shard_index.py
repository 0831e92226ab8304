"""The index of a shard: what is in it, what a shard is refused for, and an index that does not fit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hvd_train.data import shard_index
from hvd_train.errors import UsageError
from tests.support import shards

SHARD = Path("data/train/0.tar")


def scanned(*files: tuple[str, bytes]) -> shard_index.ShardIndex:
    return shard_index.scan(shards.write(SHARD, files))


def test_an_index_tells_where_each_image_is() -> None:
    """A number in a .cls counts before one in a .json; other files, hidden ones and folders are passed over."""
    index = scanned(
        ("b.JPG", b"bbbb"), ("b.cls", b" 3\n"), ("b.json", b'{"label": 9}'), ("b.txt", b"text"), ("._b.jpg", b"mac"),
        ("x/a.json", b'{"label": 12, "width": 3}'), ("x/a.webp", b"aa"), ("x/a.seg.png", b"mask"), ("README", b"?"),
    )  # fmt: skip
    content = SHARD.read_bytes()
    images = [content[begin : begin + length] for begin, length in zip(index.offsets, index.lengths, strict=True)]
    assert images == [b"bbbb", b"aa"]
    assert index.labels.tolist() == [3, 12]
    assert [index.key(number) for number in range(len(index))] == ["b", "x/a"]


def test_an_index_is_read_as_it_was_written() -> None:
    """Also that of a shard without images."""
    for files in ([("ä.jpg", b"x"), ("ä.cls", b"1"), ("b.jpg", b"yy"), ("b.cls", b"0")], []):
        written = scanned(*files)
        shard_index.path_of(SHARD).write_bytes(written.in_bytes())
        read = shard_index.read(SHARD)
        assert (read.identity, read.keys) == (written.identity, written.keys)
        for name in ("offsets", "lengths", "labels", "key_ends"):
            assert np.array_equal(getattr(read, name), getattr(written, name))


IMAGE = ("a.jpg", b"x")
FAULTS = {
    "no label": ([("a.jpg", b"x"), ("b.jpg", b"x"), ("b.cls", b"1")], "a has no label, neither a .cls nor a .json"),
    "no labels": ([("a.jpg", b"x"), ("b.jpg", b"x")], "a has no label, .* \\(and so for 1 more\\)"),
    "no image": ([IMAGE, ("a.cls", b"1"), ("c.cls", b"1")], "c has a label and no image"),
    "no image for a json": ([("c.json", b'{"label": 1}')], "c has a label and no image"),
    "two images": ([IMAGE, ("a.png", b"x"), ("a.cls", b"1")], "a is there twice: a.jpg and a.png"),
    "twice": ([IMAGE, ("a.cls", b"1"), IMAGE], "a is there twice"),
    "two labels": ([IMAGE, ("a.cls", b"1"), ("a.cls", b"2")], "a is there twice"),
    "empty": ([("a.jpg", b""), ("a.cls", b"1")], "a.jpg has 0 bytes; it must have 1 to"),
    "a name": ([IMAGE, ("a.cls", b"cat")], "a.cls holds no number of a class"),
    "a negative number": ([IMAGE, ("a.cls", b"-1")], "a.cls holds no number of a class"),
    "no text": ([IMAGE, ("a.cls", b"\xff")], "a.cls holds no number of a class"),
    "a long label": ([IMAGE, ("a.cls", b"1" * 2000)], "a.cls has 2,000 bytes; it must have 1 to 1,024"),
    "a huge number": ([IMAGE, ("a.cls", b"70000")], "a has the label 70000; those of 65,536 classes are"),
    "no JSON": ([IMAGE, ("a.json", b"{")], "a.json holds no number of a class"),
    "deep JSON": ([IMAGE, ("a.json", b"[" * 100_000)], "a.json holds no number of a class"),
    "JSON without a label": ([IMAGE, ("a.json", b'{"caption": "x"}')], 'a.json is no JSON object with a "label"'),
    "a list": ([IMAGE, ("a.json", b"[1]")], 'a.json is no JSON object with a "label"'),
    "true": ([IMAGE, ("a.json", b'{"label": true}')], "a.json holds no number of a class"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_shard_that_cannot_be_used_is_refused(fault: str) -> None:
    """One line names the shard and the key."""
    files, message = FAULTS[fault]
    with pytest.raises(UsageError, match=rf"the shard {SHARD} cannot be used: {message}") as caught:
        scanned(*files)
    assert "\n" not in str(caught.value)


def test_labels_must_be_of_the_classes_beside_the_shard() -> None:
    """Their number is that of the names."""
    shards.write(SHARD, [IMAGE, ("a.cls", b"2")])
    Path("data/classes.txt").write_text("cat\ndog\n")
    with pytest.raises(UsageError, match="a has the label 2; those of 2 classes are 0 to 1"):
        shard_index.scan(SHARD)


def test_a_shard_that_is_a_pipe_or_missing_is_named() -> None:
    """Nobody waits for it."""
    os.mkfifo("a.tar")
    for name, message in (("a.tar", "it is no file, but a pipe"), ("b.tar", "No such file")):
        with pytest.raises(UsageError, match=f"cannot read the shard {name}: {message}"):
            shard_index.scan(Path(name))


def test_names_of_classes() -> None:
    """They are in lines or in a list, beside the shards or, for the folder of a split, beside that."""
    Path("data/train").mkdir(parents=True)
    Path("other").mkdir()
    assert shard_index.class_names(Path("data/train")) is None
    Path("classes.txt").write_text("no\n")
    assert shard_index.class_names(Path("other")) is None, "other is no split"
    Path("data/classes.json").write_text('["cat", "dog"]')
    assert shard_index.class_names(Path("data/train")) == ("cat", "dog")
    Path("data/train/classes.txt").write_text("a\nb\nc\n")
    assert shard_index.class_names(Path("data/train")) == ("a", "b", "c")
    for name, text, message in (
        ("classes.txt", "", "must hold the names"), ("classes.txt", "a\n\nb\n", "must hold the names"),
        ("classes.txt", "a\na\n", "names a class twice"), ("classes.json", "{}", "must hold the names"),
        ("classes.json", "[1]", "must hold the names"), ("classes.json", "[", "cannot read the names"),
        ("classes.json", "[" * 100_000, "cannot read the names"),
    ):  # fmt: skip
        folder = Path(f"faulty{len(os.listdir())}")
        folder.mkdir()
        (folder / name).write_text(text)
        with pytest.raises(UsageError, match=message):
            shard_index.class_names(folder)


@pytest.fixture
def indexed() -> Path:
    """Return a shard with its index."""
    index = scanned(IMAGE, ("a.cls", b"1"))
    shard_index.path_of(SHARD).write_bytes(index.in_bytes())
    return SHARD


def longer(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"\0" * 512)


def touched(shard: Path) -> None:
    os.utime(shard, ns=(1, 1))


def another(shard: Path) -> None:
    times = shard.stat().st_mtime_ns
    shard.write_bytes(shard.read_bytes().replace(b"a.jpg", b"b.jpg"))
    os.utime(shard, ns=(times, times))


@pytest.mark.parametrize(("change", "what"), [(longer, "size"), (touched, "time of change"), (another, "first header")])
def test_an_index_of_another_shard_is_refused(indexed: Path, change: object, what: str) -> None:
    """One line names the shard and the command that makes the index anew."""
    change(indexed)  # type: ignore[operator]
    with pytest.raises(UsageError) as caught:
        shard_index.read(indexed)
    assert str(caught.value) == (
        f"the shard {SHARD} has another {what} than when its index was made: type `hvd-train index {SHARD}`"
    )


def test_a_damaged_index_is_refused(indexed: Path) -> None:
    """Whichever byte has changed, and wherever it was cut off."""
    path = shard_index.path_of(indexed)
    whole = path.read_bytes()
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(UsageError, match=rf"the index {path} is damaged: type `hvd-train index {SHARD}`"):
                shard_index.read(indexed)


@pytest.mark.parametrize(("name", "value"), [("offsets", -1), ("offsets", 10**9), ("lengths", 0), ("labels", 10**6)])
def test_an_index_that_leads_out_of_its_shard_is_refused(indexed: Path, name: str, value: int) -> None:
    """Whoever has written it: its sum is right."""
    index = shard_index.read(indexed)
    getattr(index, name)[0] = value
    shard_index.path_of(indexed).write_bytes(index.in_bytes())
    with pytest.raises(UsageError, match="is damaged"):
        shard_index.read(indexed)


def test_shards_are_found_by_their_folders_or_names() -> None:
    """In the order of names; a split in two ways is refused."""
    for path in ("a/train/1.tar", "a/train/0.tar", "a/val-0.tar", "a/x.tar", "b/x-train-0.tar", "b/x-validation-0.tar"):
        shards.write(Path(path), [])
    assert shard_index.find(Path("a")) == {
        "train": [Path("a/train/0.tar"), Path("a/train/1.tar")], "val": [Path("a/val-0.tar")], "test": [],
    }  # fmt: skip
    assert shard_index.find(Path("b"))["val"] == [Path("b/x-validation-0.tar")]
    shards.write(Path("a/train-0.tar"), [])
    with pytest.raises(UsageError, match=r"its train shards are both train/\*.tar and train-\*.tar"):
        shard_index.find(Path("a"))
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        shard_index.find(Path("nowhere"))
