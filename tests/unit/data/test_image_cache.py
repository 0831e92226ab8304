"""Reduced images that are kept: the same pixels however they come, and a cache that nothing and nobody can spoil."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_train.data import image_cache
from hvd_train.data.folder import open_folder
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig
from tests.support.full_disk import no_room
from tests.support.jpegs import encoded, noise

CONFIG = DataConfig(data="folder", data_dir=Path("images"), image_size=16, cache="disk", cache_dir=Path("cache"))
_FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def images() -> Path:
    """Write a data folder of images that are reduced, and some that are small, long, turned or no JPEG files."""
    root = Path("images")
    turned = noise(50, 70).getexif()
    turned[0x0112] = 6
    files = {
        "0.jpg": encoded(noise(60, 45)),
        "1.jpg": encoded(noise(12, 9)),
        "2.jpg": encoded(noise(300, 20)),
        "3.jpg": encoded(noise(50, 70), exif=turned),
        "4.png": encoded(noise(41, 83), "png"),
        "5.jpg": encoded(noise(37, 64, "L")),
    }
    for split in ("train", "val"):
        for name, content in files.items():
            path = root / split / "cat" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return root


def seen(config: DataConfig = CONFIG, split: str = "train") -> list[Tensor]:
    """Return what the model sees of each image, as a process that starts now reads it, with the same random crops."""
    source = getattr(open_folder(Path("images"), config), split)
    items = []
    for index in range(len(source)):
        torch.manual_seed(index)
        items.append(source[index][0])
    return items


def entries() -> list[Path]:
    """Return the files of images that are kept."""
    return sorted(path for path in Path("cache").glob("*/*/??/*") if not path.suffix)


def unfinished() -> list[Path]:
    """Return the files of images that are being written, or were."""
    return list(Path("cache").glob("*/*/??/*.partial"))


def disk(room: int, files: int = 1000, size: int = 10**11) -> SimpleNamespace:
    """Return what the system says of a file system of so many bytes, a twentieth of which is left to others."""
    return SimpleNamespace(f_frsize=1, f_blocks=size, f_bavail=room + size // 20, f_files=20_000, f_favail=files + 1000)


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether the images are equal to the bit."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


def run_apart(work: Callable[[], None]) -> int | None:
    """Run this in a process of its own and return its exit code."""
    process = _FORK.Process(target=work)
    process.start()
    process.join(60)
    return process.exitcode


def test_an_image_is_the_same_whether_it_was_kept_or_not() -> None:
    """The first epoch trains on the pixels of the second, and no file is decoded again."""
    first = seen()
    assert len(entries()) == len(first) == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_cache, "Picture", None)
        assert same(seen(), first)


@pytest.mark.parametrize("changes", [{}, {"val_resize_size": 30, "val_crop_size": 20}, {"val_crop_size": 40}])
def test_evaluation_sees_the_same_with_and_without_a_cache(changes: dict[str, int]) -> None:
    """Images are reduced to what evaluation would make of them anyway, so scores do not depend on the cache."""
    without = seen(replace(CONFIG, cache="none", cache_dir=None, **changes), "val")  # type: ignore[arg-type]
    for _ in range(2):
        assert same(seen(replace(CONFIG, **changes), "val"), without)  # type: ignore[arg-type]


def test_training_without_random_changes_sees_the_same_with_and_without_a_cache() -> None:
    """Of the images themselves, only random crops lose something by the reduction."""
    without = seen(replace(CONFIG, augment="none", cache="none", cache_dir=None))
    assert same(seen(replace(CONFIG, augment="none")), without)


def test_a_changed_file_is_read_again(images: Path) -> None:
    """Size or times of change tell, be they set back; the other images stay kept."""
    before, path = seen(), images / "train" / "cat" / "0.jpg"
    path.write_bytes(encoded(noise(60, 46)))
    resized = seen()
    assert [torch.equal(*pair) for pair in zip(before, resized, strict=True)] == [False] + 5 * [True]
    status, other = path.stat(), encoded(noise(60, 46), quality=10)
    path.write_bytes(other[:-2].ljust(status.st_size - 2, b"\0") + other[-2:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert not torch.equal(seen()[0], resized[0])


def test_a_time_that_no_clock_shows_is_one_like_any_other(images: Path) -> None:
    """File systems hold times far beyond what 64 bits of nanoseconds can; the image is kept as others are."""
    real = Path.stat

    class Far:
        """What the system says of a file, but for the time."""

        def __init__(self, status: os.stat_result) -> None:
            self._status, self.st_mtime_ns = status, 2**70

        def __getattr__(self, name: str) -> Any:
            return getattr(self._status, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "stat", lambda path, **how: Far(real(path, **how)))
        first = seen()
        assert len(entries()) == len(first)
        patch.setattr(image_cache, "Picture", None)
        assert same(seen(), first)


def test_a_file_that_is_gone_is_named(images: Path) -> None:
    """A kept image does not hide that the data folder has lost a file."""
    data = open_folder(images, CONFIG)
    path = images / "train" / "cat" / "5.jpg"
    data.train[5]  # type: ignore[index]
    path.unlink()
    with pytest.raises(UsageError, match=r"cannot read the image .*5\.jpg: .*No such file"):
        data.train[5]  # type: ignore[index]


@pytest.mark.parametrize("moment", ["write", "replace"])
def test_a_writer_that_is_killed_leaves_nothing_that_is_read(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that was being written is made anew, and kept once what is left of it is an hour old."""
    whole = seen(replace(CONFIG, cache_dir=Path("other")))

    def killed() -> None:
        monkeypatch.setattr(os, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        seen()

    assert run_apart(killed) == -signal.SIGKILL
    assert entries() == []
    (leftover,) = unfinished()
    assert same(seen(), whole)
    assert leftover.exists()  # of another job, perhaps, that writes it at this moment
    assert len(entries()) == 5
    os.utime(leftover, (0, time.time() - 2 * 3600))
    for _ in range(2):
        assert same(seen(), whole)
    assert not leftover.exists()
    assert len(entries()) == 6


def test_what_is_no_whole_image_is_made_anew() -> None:
    """A file that was cut off, filled with something else or replaced by a pipe is nobody's image."""
    first = seen()
    sizes = [path.stat().st_size for path in entries()]
    cut, longer, empty, other, pipe, _ = entries()
    cut.write_bytes(cut.read_bytes()[:-1])
    longer.write_bytes(longer.read_bytes() + b"x")
    empty.write_bytes(b"")
    other.write_bytes(b"x" * other.stat().st_size)
    pipe.unlink()
    os.mkfifo(pipe)
    assert same(seen(), first)
    assert all(path.is_file() and path.read_bytes()[:8] == image_cache._KIND for path in entries())
    assert [path.stat().st_size for path in entries()] == sizes


def test_bytes_that_a_disk_has_lost_are_no_image() -> None:
    """After a power failure a file may have its name and its size but zeroes in it; a bit may flip at any time."""
    first = seen()
    zeroes, flipped, *_ = entries()
    content = zeroes.read_bytes()
    zeroes.write_bytes(content[: image_cache._HEADER.size].ljust(len(content), b"\0"))
    content = flipped.read_bytes()
    flipped.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    assert same(seen(), first)


def test_an_entry_of_somebody_else_is_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were one planted, it would decide what is trained on."""
    seen()
    read: list[bool] = []
    monkeypatch.setattr(os, "readv", lambda *_: read.append(True))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert image_cache._read(entries()[0], (0, 0, 0)) is None
    assert not read


def test_a_full_disk_is_told_once_and_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Training goes on without the cache, in all processes, with the same pixels."""
    whole = seen(replace(CONFIG, cache_dir=Path("other")))
    with no_room():
        assert same(seen(), whole)

        def other_process() -> None:
            assert same(seen(), whole)

        assert run_apart(other_process) == 0
    assert entries() == unfinished() == []
    (line,) = capfd.readouterr().err.splitlines()
    assert "--cache disk: no more images of images/train are kept in cache/" in line
    assert "(No space left on device); the others are decoded each time" in line


def test_what_fails_for_one_image_is_tried_with_the_next(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what every image would meet ends the keeping of them."""
    real, tried = os.replace, []

    def replaced(*paths: Any) -> None:
        tried.append(paths)
        if len(tried) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*paths)

    monkeypatch.setattr(os, "replace", replaced)
    seen()
    assert (len(tried), len(entries()), capfd.readouterr().err) == (6, 5, "")


def test_some_room_is_left_to_others(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever maps files of a full /dev/shm is killed, and a full home takes no commit: keeping ends before."""
    source = open_folder(Path("images"), CONFIG).train
    for free in (disk(100), disk(10**9, files=0)):
        monkeypatch.setattr(os, "statvfs", lambda _, free=free: free)
        source[0]  # type: ignore[index]
        assert entries() == unfinished() == []
        source = open_folder(Path("images"), CONFIG).train
    assert "(what is free there is left to others); the others are decoded" in capfd.readouterr().err


def test_a_cache_that_is_removed_is_made_anew_for_this_user_alone() -> None:
    """Training goes on; a folder that somebody else has put there meanwhile is not written into."""
    source = open_folder(Path("images"), CONFIG).train
    source[0]  # type: ignore[index]
    shutil.rmtree("cache")
    source[1]  # type: ignore[index]
    (kept,) = entries()
    folder = kept.parents[2]
    assert folder.stat().st_mode & 0o077 == 0
    shutil.rmtree(folder)
    folder.mkdir()
    folder.chmod(0o777)
    source[2]  # type: ignore[index]
    assert entries() == []


def test_two_processes_may_fill_a_cache_at_once() -> None:
    """Each sees what it would see alone, and one file remains for each image."""
    whole = seen(replace(CONFIG, cache_dir=Path("other")))
    start = _FORK.Barrier(2)

    def fill() -> None:
        start.wait(30)
        for _ in range(10):
            assert same(seen(), whole)
            for path in entries():
                path.unlink(missing_ok=True)
        assert same(seen(), whole)

    processes = [_FORK.Process(target=fill) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert same(seen(), whole)
    assert len(entries()) == 6
    assert unfinished() == []


def test_a_cache_is_for_this_user_alone() -> None:
    """Images may be private; what is kept of them can be read by nobody else."""
    seen()
    folder = Path("cache") / f"hvd_train-images-{os.geteuid()}"
    assert folder.stat().st_mode & 0o077 == 0


def test_too_little_room_lets_no_training_begin_unless_images_are_kept_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line says how much is needed and how much there is; all of the room is not enough."""
    needed, files = open_folder(Path("images"), CONFIG).train.missing()  # type: ignore[union-attr]
    for free in (disk(2 * needed), disk(10**9, files=2 * files), disk(10**9 - 5 * 10**7, size=10**9)):
        monkeypatch.setattr(os, "statvfs", lambda _, free=free: free)
        data = open_folder(Path("images"), CONFIG)
        assert data.refusal is not None
        assert data.refusal.startswith("--cache disk: the reduced images need about 0.00 GB in 12 files, and cache/")
        assert data.refusal.endswith("is left to others: name another --cache-dir, or leave --cache out")
    monkeypatch.setattr(os, "statvfs", lambda _: disk(2 * needed + 1, files=2 * files + 1))
    data = open_folder(Path("images"), CONFIG)
    assert data.refusal is None
    assert data.note is not None
    assert data.note.startswith("--cache disk is to keep about 0.00 GB in 12 files in cache/")
    seen()
    seen(split="val")
    monkeypatch.setattr(os, "statvfs", lambda _: disk(0))
    data = open_folder(Path("images"), CONFIG)
    assert (data.refusal, data.note) == (None, None)


def test_another_library_keeps_images_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes pixels may make others in another version; what only refuses files makes none."""
    seen()
    seen(replace(CONFIG, max_image_pixels=10**6))
    assert len(entries()) == 6
    monkeypatch.setattr(torch, "__version__", "9.9")
    seen()
    assert len(entries()) == 12
    monkeypatch.setattr(image_cache.features, "version", lambda name: f"9.9 of {name}")
    seen()
    assert len(entries()) == 18


def test_the_estimate_of_the_room_is_that_of_the_files() -> None:
    """It counts whole blocks of a disk: a small image takes one, too."""
    source = open_folder(Path("images"), CONFIG).train
    needed = source.missing()  # type: ignore[union-attr]
    seen()
    assert needed == (sum(-(-path.stat().st_size // 4096) * 4096 for path in entries()), len(entries()))
