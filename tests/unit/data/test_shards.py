"""Data sets in shards: their formats, their identity, their copies on the host, and damage.

`shards/` was written by webdataset 1.0.2 and mosaicml-streaming 0.13.0.
"""

import itertools
import multiprocessing
import os
import pickle
import queue
import resource
import shutil
import tarfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from PIL import Image
from torch import Tensor

from hvd_train import cli
from hvd_train.config import DataConfig
from hvd_train.data import store
from hvd_train.data.read_ahead import ReadAhead, _warn
from hvd_train.data.shards import Shards
from hvd_train.data.sources import check_name, open_data
from hvd_train.data.store import without_secrets
from hvd_train.errors import DataTimeout, UsageError
from hvd_train.progress.order import Batch, BatchLayout, Indices, Order, assignments
from tests.support.jpegs import encoded
from tests.support.s3 import BUCKET, serving
from tests.support.shards import Shaky, keys_of, write_samples, write_tar

WRITTEN = Path(__file__).parent / "shards"


COPIES = Path("cache/hvd_train/shards")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Shaky, "errors", [])
    monkeypatch.setattr(Shaky, "fetched", [])


def copies() -> list[str]:
    return sorted(os.listdir(COPIES))


def copied() -> list[str]:
    """Return which of the shards a.tar, b.tar, ... have copies."""
    return sorted(name.split(".")[2] for name in copies())


def remote(**settings: Any) -> Shards:
    """Return the shards of data/ at a URL whose table is there, but none of whose shards was
    copied.
    """
    Shards("shaky://data", cache_size=0)
    return Shards("shaky://data", decode=dict, **settings)


def write_each(names: str) -> int:
    """Write a shard of one sample for each name, and return the size of one."""
    paths = [write_tar(f"data/{name}.tar", [name]) for name in names]
    return paths[0].stat().st_size


def plain_items(shards: Shards) -> list[Any]:
    items = [shards[number] for number in range(len(shards))]
    return [
        {name: v.tolist() if isinstance(v, Tensor) else v for name, v in item.items()}
        for item in items
    ]


def picture(number: int) -> Any:
    pixels = torch.arange(number, number + 12, dtype=torch.uint8)
    return pixels.view(2, 2, 3).permute(2, 0, 1).tolist()


@pytest.mark.parametrize("url", [WRITTEN, f"{WRITTEN}/wds-*.tar", f"{WRITTEN}/wds-{{0..1}}.tar"])
def test_tar_files_of_webdataset_are_read(url: str | Path) -> None:
    """The key ends at the first dot of the name; the rest, in lower case, names a part."""
    shards = Shards(url)
    assert plain_items(shards) == [
        {
            "__key__": f"sub/{number}" + "-" * 110 * (number == 1),
            "png": picture(number),
            "cls": number,
            "json": {"i": [number]},
            "txt": f"é{number}",
            "x.npy": [*range(number)],
            "bin": b"b",
        }
        for number in range(3)
    ]
    assert shards[0]["png"].dtype == torch.uint8


@pytest.mark.parametrize("folder", ["mds", pytest.param("mds-zstd", marks=pytest.mark.slow)])
def test_mds_of_streaming_is_read(folder: str) -> None:
    """Each encoding but pickle becomes numbers, texts and tensors."""
    if folder == "mds-zstd":
        pytest.importorskip("zstandard")
    shards = Shards(WRITTEN / folder)
    assert plain_items(shards) == [
        {
            "image": picture(number),
            "class": -number,
            "a": [*range(300 * number + 1)],
            "b": [[number] * (number + 1)] * 2,
            "c": [[number] * 3] * 2,
            "j": {"i": [number]},
            "s": f"é{number}",
            "x": number,
            "f": number / 2,
            "p": picture(number),
            "n": 10**20 + number,
            "r": b"b",
        }
        for number in range(3)
    ]
    kinds = (torch.int64, torch.float32, torch.int16)
    assert tuple(shards[1][name].dtype for name in "abc") == kinds


def test_own_decode_gets_bytes() -> None:
    """It returns the item, and may be sent to other processes with the data set."""
    shards = pickle.loads(pickle.dumps(Shards(WRITTEN, decode=dict)))
    assert shards[2]["cls"] == b"2"
    assert shards[-1] == shards[2]
    with pytest.raises(IndexError):
        shards[3]


def test_shards_of_any_size_follow_one_another() -> None:
    """Also without samples, and with files between them that belong to no sample."""
    expected = []
    for shard, size in enumerate((0, 3, 1, 0, 7, 0)):
        keys = [f"{shard}-{number}" for number in range(size)]
        write_tar(f"data/{shard}.tar", keys, a=700, b=0)
        expected += keys
    with tarfile.open("data/1.tar", "a") as tar:
        for name in ("README", "__meta__/a.json", "folder"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if name == "folder" else tarfile.REGTYPE
            tar.addfile(member)
    shards = Shards("data", decode=dict)
    assert keys_of(shards) == expected
    assert shards[3].keys() == {"__key__", "a", "b"}


def test_identity_follows_the_shards_not_their_place() -> None:
    """A run refuses to resume with other samples, and accepts a copy of the same ones."""

    def identity_of(folder: str, **parts: int) -> bytes:
        for name in "ab":
            write_tar(f"{folder}/{name}.tar", name, **parts)
        return Shards(folder).content_of_files()

    first = identity_of("first", bin=3)
    assert identity_of("copy", bin=3) == first
    assert identity_of("longer", bin=4) != first
    assert identity_of("renamed", cls=3) != first


@pytest.mark.parametrize(
    "change",
    [lambda path: write_tar(path, "ab", bin=3000), lambda path: os.utime(path, (1, 1))],
    ids=["size", "time"],
)
@pytest.mark.parametrize(
    ("url", "cache_size"), [("data", None), ("shaky://data", None), ("shaky://data", 0)]
)
def test_a_shard_that_changes_is_not_read(
    change: Callable[[Path], object], url: str, cache_size: int | None
) -> None:
    """One line names it; a new start makes a new table."""
    path = write_tar("data/a.tar", "ab")
    Shards(url, cache_size=0)
    shards = Shards(url, decode=dict, cache_size=cache_size)
    change(path)
    with pytest.raises(UsageError, match=r"a\.tar has changed.*start again"):
        shards[0]
    assert keys_of(Shards(url, decode=dict)) == ["a", "b"]


def test_links_to_shards_are_followed() -> None:
    path = write_tar("store/a.tar", "a")
    Path("data").mkdir()
    Path("data/b.tar").symlink_to("../store/a.tar")
    os.utime(path, (1, 1))
    assert keys_of(Shards("data", decode=dict)) == ["a"]


def overwrite(path: Path, place: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(content)


def test_a_damaged_sample_is_named() -> None:
    """The error has its number, key and place, and what to do; other samples can be read."""
    overwrite(write_tar("data/a.tar", "abc", cls=3), 1024 + 512, b"xyz")
    where = r"sample 1 \('b', bytes 1,024 to 2,048 of a\.tar\)"
    with pytest.raises(UsageError, match=rf"{where}: ValueError.*'xyz'.*write the shard again"):
        Shards("data")[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: overwrite(path, 0, b"no header"),
        lambda path: overwrite(path, 1024, b"no header"),
        lambda path: os.truncate(path, 2048 + 513),
    ],
)
@pytest.mark.parametrize("url", ["data", "shaky://data"])
def test_a_damaged_shard_is_refused(damage: Callable[[Path], object], url: str) -> None:
    """No sample after the damage is left out silently."""
    damage(write_tar("data/a.tar", "abc", cls=3))
    with pytest.raises(UsageError, match=r"cannot read a\.tar"):
        Shards(url, cache_size=0)


def test_a_cut_off_mds_shard_is_named() -> None:
    shutil.copytree(WRITTEN / "mds", "data")
    os.truncate("data/shard.00001.mds", 100)
    with pytest.raises(UsageError, match=r"shard\.00001\.mds has changed"):
        Shards("data")[1]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("none", r"FileNotFoundError"),
        ("*.tar", r"no index\.json of MDS and no \*\.tar"),
        ("gibberish://user:secret@host/x?secret", r"^gibberish://host/x: cannot open it"),
    ],
)
def test_a_wrong_url_is_one_line(url: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as found:
        Shards(url)
    assert "secret" not in str(found.value)
    assert "\n" not in str(found.value)


def test_errors_have_no_credentials() -> None:
    """Of libraries, too, which may quote a signed URL."""
    text = "404, url='https://me:key@host/a b', or s3://k:s@b/x?X-Amz=1&y (see http://c/d?e)"
    assert without_secrets(text) == "404, url='https://host/a b', or s3://b/x (see http://c/d)"


def test_a_shard_is_fetched_once_for_all_readers_of_a_host() -> None:
    """Whoever comes first fetches it; the others wait for the whole shard."""
    keys = [*map(str, range(16))]
    write_tar("data/a.tar", keys, bin=10_000)
    readers = [remote() for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(keys_of, readers)] == [keys] * 8
    assert Shaky.fetched == ["a.tar"]
    assert copied() == ["a"]


def test_a_failing_store_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a whole shard has come."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    write_tar("data/a.tar", "ab")
    shards = remote()
    Shaky.errors += [TimeoutError("slow"), ConnectionResetError("gone")]
    assert keys_of(shards) == ["a", "b"]
    assert not Shaky.errors


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (
            TimeoutError("https://me:secret@host/a is slow"),
            DataTimeout,
            r"cannot fetch a\.tar \(TimeoutError: https://host/a is slow\); try again",
        ),
        (
            PermissionError("https://host/a?sig=secret is forbidden"),
            UsageError,
            r"cannot fetch a\.tar \(PermissionError: https://host/a is forbidden",
        ),
    ],
)
def test_a_store_that_gives_no_shard_is_one_line(
    error: Exception, kind: type[Exception], says: str
) -> None:
    """After `data_timeout` the job commits and ends; a forbidden shard is an error at once."""
    write_tar("data/a.tar", "ab")
    shards = remote(data_timeout=0.1)
    Shaky.errors.append(error)
    with pytest.raises(kind, match=says):
        shards[0]
    assert copies() == []


@pytest.mark.parametrize("is_sent", [True, False], ids=["slow", "silent"])
def test_a_silent_store_fails_and_a_slow_one_does_not(
    is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If bytes arrive, a shard may take longer than the limit. A late answer changes nothing."""
    write_tar("data/a.tar", "ab")
    shards = remote(data_timeout=5)
    is_whole = threading.Event()
    has_come = threading.Event()
    seconds = itertools.count()

    def clock() -> float:
        """Return the next second, in which a byte may have come; it stands still at the end."""
        now = min(next(seconds), 30)
        if now == 30:
            is_whole.set()
        elif is_sent:
            for path in COPIES.glob("*"):
                path.write_bytes(b"-" * now)
        return now

    def get(system: Shaky, path: str, local: str) -> None:
        is_whole.wait(60)
        Path(local).write_bytes(Path(path).read_bytes())
        has_come.set()

    with monkeypatch.context() as changed:
        changed.setattr(Shaky, "get_file", get)
        fake = SimpleNamespace(monotonic=clock, sleep=time.sleep, time_ns=time.time_ns)
        changed.setattr(store, "time", fake)
        changed.setattr(store, "_LOOK_S", 0.001)
        if is_sent:
            assert keys_of(shards) == ["a", "b"]
        else:
            says = r"cannot fetch a\.tar \(TimeoutError: no answer\)"
            with pytest.raises(DataTimeout, match=says):
                shards[0]
    assert keys_of(shards) == ["a", "b"]
    is_whole.set()
    assert has_come.wait(60)
    assert copied() == ["a"]


def test_after_a_kill_the_next_reader_fetches_the_shard() -> None:
    """Nothing needs to be cleaned: the lock of a half shard dies with its process."""
    write_tar("data/a.tar", "ab", bin=100_000)
    shards = remote()
    Shaky.errors.append(SystemExit())
    killed = multiprocessing.get_context("fork").Process(target=shards.__getitem__, args=(0,))
    killed.start()
    killed.join()
    Shaky.errors.clear()
    (left,) = copies()
    assert (killed.exitcode, left.endswith(".partial")) == (-9, True)
    assert keys_of(shards) == ["a", "b"]
    assert copies() == [left.removesuffix(".partial")]


def test_the_cache_keeps_to_its_size() -> None:
    """Shards that were used longest ago go first, also what a killed process left."""
    size = write_each("abcd")
    shards = remote(cache_size=2 * size)
    _ = shards[0], shards[1], shards[0], shards[2]
    assert copied() == ["a", "c"]
    assert Shaky.fetched == ["a.tar", "b.tar", "c.tar"]
    one = remote(cache_size=size // 2)
    with pytest.raises(UsageError, match="less than one shard"):
        one[3]


def test_released_shards_make_room_first() -> None:
    """Though they were used last; not if they are fetched again meanwhile."""
    shards = remote(cache_size=3 * write_each("abcd"))
    for number in range(3):
        shards.fetch(number)
    assert shards.have_room({0}, 3)
    assert not shards.have_room({0, 1}, 2)
    _ = shards[1]
    for number in range(1, 4):
        shards.release(number)
    shards.fetch(2)
    shards.fetch(3)
    assert copied() == ["a", "c", "d"]


def test_without_a_limit_a_tenth_of_the_disk_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    size = write_each("abc")
    assert keys_of(remote()) == ["a", "b", "c"]
    write_each("d")
    shards = remote()
    disk = SimpleNamespace(total=100 * size, free=10 * size)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk)
    assert shards[3]["__key__"] == "d"
    assert copied() == ["b", "c", "d"]


def test_without_a_cache_each_sample_is_read_from_the_url() -> None:
    write_tar("data/a.tar", "abc")
    assert keys_of(remote(cache_size=0)) == ["a", "b", "c"]
    assert Shaky.fetched == []


def test_a_full_disk_is_one_line() -> None:
    """It names the cache and what to do, and leaves no part of a shard."""
    write_tar("data/a.tar", "a", bin=200_000)
    shards = remote()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UsageError, match=r"cannot write to the cache .*make room there"):
            shards[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert copies() == []
    assert keys_of(shards) == ["a"]


def test_a_torn_copy_is_fetched_again() -> None:
    """As after a power failure."""
    write_tar("data/a.tar", "ab")
    shards = remote()
    assert keys_of(shards) == ["a", "b"]
    os.truncate(COPIES / copies()[0], 10)
    assert keys_of(shards) == ["a", "b"]
    assert len(Shaky.fetched) == 2


def test_loader_processes_map_the_table_themselves(tmp_path: Path) -> None:
    """What is sent to them does not grow with the number of samples."""
    sizes = []
    for count in (1, 1000):
        folder = tmp_path / f"{count:04}"
        folder.mkdir()
        write_samples(folder / "0.tar", [{"txt": b"%d" % number} for number in range(count)])
        shards = Shards(folder, cache=tmp_path / "table")
        sent = pickle.dumps(shards)
        assert pickle.loads(sent)[count - 1] == shards[count - 1]
        sizes.append(len(sent))
    assert sizes[1] - sizes[0] < 100


def indexed(folder: str) -> Path:
    """Write two tar files and the table of them, which `hvd-train index` keeps."""
    for name in "ab":
        write_tar(f"{folder}/{name}.tar", [f"{name}{number}" for number in range(9)], bin=700)
    assert cli.run(["index", folder]) == 0
    (table,) = Path(folder).glob(".hvd_train-*.index")
    return table


def test_a_kept_table_saves_reading_the_headers() -> None:
    """Of copies of the tar files, too, at any place and time; other readers see no such file."""
    table = indexed("made")
    for place in ("here", "there"):
        shutil.copytree("made", place, copy_function=shutil.copy)
        overwrite(Path(place, "a.tar"), 12 * 512, b"no header")  # headers are not read here
    for url in ("here", "shaky://there"):
        shards = Shards(url, decode=dict)
        assert len(shards) == 18
        assert shards[17]["__key__"] == "b8"
        assert shards.content_of_files() == Shards("made").content_of_files()
    Path("here", table.name).unlink()
    with pytest.raises(UsageError, match=r"cannot read a\.tar"):
        Shards("here")


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.write_bytes(table.read_bytes().replace(b"\x09", b"\x08")),
        lambda table: write_tar("data/a.tar", "ABCDEFGHI", bin=700),
    ],
    ids=["another byte", "other shards"],
)
def test_a_damaged_or_old_table_is_not_used(
    change: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so; the command makes it again."""
    table = indexed("data")
    change(table)
    for _ in range(2):
        shards = Shards("data", decode=dict)
        assert (len(shards), shards[17]["__key__"]) == (18, "b8")
        assert shards[0]["bin"].startswith(shards[0]["__key__"].encode())
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert f"{table.name} is damaged or of other shards: reading all headers" in printed
    assert cli.run(["index", "data"]) == 0
    assert len(Shards("data")) == 18
    assert capsys.readouterr().err == ""


def write_labelled(folder: str, *, in_folders: bool) -> None:
    for part, labels in (("train", (0, 2, 1)), ("validation", (1,))):
        for number, label in enumerate(labels):
            name = f"{part}/{number}" if in_folders else f"set-{part}-{number}"
            image = encoded(Image.new("L", (9, 6 + number), 100 + label), "png")
            write_samples(Path(folder, f"{name}.tar"), [{"png": image, "cls": b"%d" % label}])


def test_index_finds_training_and_validation_sets(capsys: pytest.CaptureFixture[str]) -> None:
    """As `--data shards:` does: in folders, or tar files so named; or a set that is named."""
    for root in ("files", "folders"):
        write_labelled(root, in_folders=root == "folders")
        assert cli.run(["index", f"shaky://{root}"]) == 0
        assert len([*Path(root).rglob(".hvd_train-*.index")]) == 2
        assert open_data(DataConfig(data=f"shards:shaky://{root}"), 0).classes == ("0", "1", "2")
    assert cli.run(["index", "files/set-train-{0..1}.tar"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("for 3 samples") == 2
    assert "for 2 samples" in printed


def test_a_table_that_cannot_be_kept_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("https://me:secret@host is read-only")

    monkeypatch.setattr(Shaky, "pipe_file", refuse)
    write_tar("data/a.tar", "ab")
    for url, says in (
        ("shaky://data", "https://host is read-only"),
        (f"{WRITTEN}/mds", "is in MDS format, whose index.json is all that it needs"),
    ):
        assert cli.run(["index", url]) == 2
        printed = capsys.readouterr().err
        assert says in printed
        assert printed.count("\n") == 1


@pytest.mark.parametrize("in_folders", [True, False])
def test_images_of_shards_are_cropped_as_those_of_class_folders(in_folders: bool) -> None:
    """Classes are counted, or named by classes.txt."""
    write_labelled("set", in_folders=in_folders)
    config = DataConfig(data="shards:set", image_size=4, cache_dir=Path("copies"))
    data = open_data(config, 0)
    assert (len(data.train), len(data.val), data.classes) == (3, 1, ("0", "1", "2"))
    for number, label in enumerate((0, 2, 1)):
        image, found = data.train[number]
        assert (image.shape, image.dtype, found) == ((3, 4, 4), torch.uint8, label)
        assert image.unique().tolist() == [100 + label]
    (counted,) = Path("copies/indexes").glob("*.classes")
    counted.write_text("4")
    assert len(open_data(config, 0).classes) == 4, "they are counted once a host"
    Path("set/classes.txt").write_text("cat\ndog\n")
    data = open_data(config, 0)
    assert data.classes == ("cat", "dog")
    with pytest.raises(UsageError, match="its class is 2, and there are 2"):
        data.train[1]


def test_other_tasks_get_dicts() -> None:
    """Their own code names the parts."""
    write_labelled("set", in_folders=True)
    data = open_data(DataConfig(data="shards:set"), 0, any_items=True)
    item = data.train[1]
    assert (item["cls"], item["png"].shape, data.images) == (2, (3, 7, 9), False)


@pytest.mark.parametrize("url", ["https://me:secret@host/x", "https://host/x?key=secret"])
def test_credentials_in_a_setting_are_refused(url: str) -> None:
    """A run writes its settings to files."""
    with pytest.raises(UsageError, match=r"leave out user, password and query") as found:
        check_name(f"shards:{url}")
    assert "secret" not in str(found.value)


def test_shards_without_a_training_set_are_one_line() -> None:
    write_tar("data/a.tar", "a")
    with pytest.raises(UsageError, match=r"no folder train and no \*train\*\.tar"):
        open_data(DataConfig(data="shards:data"), 0)


class Recorder:
    """A data set of shards of ten samples, of which the first cannot be fetched."""

    def __init__(self, room: int = 100) -> None:
        self.fetched = queue.SimpleQueue[int]()
        self.released = queue.SimpleQueue[int]()
        self.release = self.released.put
        self.room = room

    def shards_of(self, samples: Indices) -> Indices:
        return samples // 10

    def have_room(self, shards: Collection[int], num_ranks: int) -> bool:
        return num_ranks * len(shards) <= self.room

    def fetch(self, shard: int) -> None:
        self.fetched.put(shard)
        if shard == 0:
            raise UsageError("no such shard")


def taken(events: queue.SimpleQueue[int], count: int) -> set[int]:
    return {events.get(timeout=60) for _ in range(count)}


def batches_of(samples: int, size: int) -> Iterator[Batch]:
    return assignments(Order(samples), 0, BatchLayout(size, 5), 0, 1)


def test_shards_of_later_batches_are_fetched_once() -> None:
    """As far ahead as asked, while earlier batches train, also if a shard cannot be fetched."""
    data = Recorder()
    ahead = ReadAhead(data, batches_of(100, 20), 2)
    assert taken(data.fetched, 4) == {0, 1, 2, 3}
    ahead.advance()
    assert taken(data.fetched, 2) == {4, 5}
    ahead.stop()
    ahead.advance()
    again = ReadAhead(data, batches_of(15, 5), 100)
    assert taken(data.fetched, 2) == {0, 1}
    again.stop()
    assert data.fetched.empty()


def test_no_more_shards_are_fetched_than_there_is_room_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Beyond those that later batches need; a line says so if one batch needs more."""
    data = Recorder(room=6)
    ahead = ReadAhead(data, batches_of(100, 15), 4, 2)
    assert taken(data.fetched, 3) == {0, 1, 2}
    ahead.advance()
    assert taken(data.released, 1) == {0}
    assert taken(data.fetched, 1) == {3}
    ahead.advance()
    assert taken(data.released, 2) == {1, 2}
    assert taken(data.fetched, 2) == {4, 5}
    ahead.stop()
    assert capsys.readouterr().err == ""
    assert data.fetched.empty()
    _warn.cache_clear()
    ahead = ReadAhead(data, batches_of(100, 50), 1, 2)
    assert taken(data.fetched, 3) == {0, 1, 2}
    ahead.advance()
    assert taken(data.fetched, 3) == {5, 6, 7}
    ahead.stop()
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "--cache-size is less than the shards that --shuffle-window reads at once" in printed


def check_same(here: str, there: str, **settings: Any) -> None:
    """Assert that shards at a URL are read as local ones, and are the same data."""
    local = Shards(here, decode=dict)
    found = Shards(there, decode=dict, **settings)
    assert [found[number] for number in range(3)] == [local[number] for number in range(3)]
    assert found.content_of_files() == local.content_of_files()


@pytest.mark.slow
@pytest.mark.parametrize("cache_size", [None, 0, "70KB"])
def test_shards_of_a_web_server_that_fails_now_and_then(
    cache_size: str | int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serving(WRITTEN, monkeypatch) as s3:
        s3.fails_every = 3
        url = f"{os.environ['AWS_ENDPOINT_URL']}/bucket/set"
        for name in ("wds-{0..1}.tar", "mds"):
            check_same(f"{WRITTEN}/{name}", f"{url}/{name}", cache_size=cache_size)
        with pytest.raises(UsageError, match="FileNotFoundError"):
            Shards(f"{url}/none/")


@pytest.mark.slow
def test_shards_of_an_s3_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is replaced is noticed."""
    with serving(WRITTEN, monkeypatch):
        for name in ("wds-*.tar", "", "mds"):
            check_same(f"{WRITTEN}/{name}", f"{BUCKET}/{name}")
        assert cli.run(["index", BUCKET]) == 0
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        assert any(".hvd_train-" in path for path in system.ls(BUCKET))
        in_place = Shards(BUCKET, cache="other", cache_size=0)
        images = Shards(BUCKET, cache="other")
        system.put(f"{WRITTEN}/wds-1.tar", f"{BUCKET}/wds-0.tar")
        for each in (in_place, images):
            with pytest.raises(UsageError, match=r"wds-0\.tar has changed"):
                each[0]
