"""Where reduced images are kept: in a folder that nobody else can fill, on a file system that others use, too."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_train.data import cache_folder
from hvd_train.data.cache_folder import CacheFolder
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig

DATA = Path("images")
CONFIG = DataConfig(data="folder", data_dir=DATA, cache="disk", cache_dir=Path("cache"))
NAME = f"hvd_train-images-{os.geteuid()}"


def made(config: DataConfig = CONFIG) -> CacheFolder:
    """Return the folder that a config asks for."""
    folder = CacheFolder.of(config, DATA)
    assert folder is not None
    return folder


def test_a_folder_that_others_may_write_into_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who fills a cache decides what is trained on, so a link and a folder of somebody else are none."""
    folder = Path("cache") / NAME
    folder.mkdir(parents=True)
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        with pytest.raises(UsageError, match="another user may write into it"):
            made()
    folder.chmod(0o700)
    folder.rename(folder.with_name("hvd_train-images-12345"))
    folder.symlink_to("hvd_train-images-12345")
    with pytest.raises(UsageError, match="it is a link"):
        made()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match="another user may write into it"):
        made()


def test_a_cache_inside_of_the_data_folder_is_refused() -> None:
    """Its folders would be taken for classes."""
    (DATA / "train").mkdir(parents=True)
    with pytest.raises(UsageError, match="it is in the folder of the data; or name another --cache-dir"):
        made(replace(CONFIG, cache_dir=DATA / "train"))
    assert list((DATA / "train").iterdir()) == []


def test_a_file_system_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network file system does whose server is gone."""

    def gone(_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "statvfs", gone)
    with pytest.raises(UsageError, match=r"--cache disk: cannot use cache/.*: Stale file handle"):
        made().plan(1, 1)


@pytest.mark.parametrize("short", ["of the machine", "of the job"])
def test_images_in_memory_leave_memory_to_the_job(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in /dev/shm counts against the memory of the machine, and of a job with a limit."""
    monkeypatch.setattr(cache_folder, "_MEMORY", Path("memory"))
    disk = SimpleNamespace(f_frsize=1, f_blocks=10**11, f_bavail=10**11, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    least = 5 * 10**9 + 1000  # of which a twentieth of the file system is left to others
    machine, job = (least, 10**11) if short == "of the machine" else (10**11, least)
    monkeypatch.setattr(cache_folder.psutil, "virtual_memory", lambda: SimpleNamespace(available=machine))
    monkeypatch.setattr(cache_folder.control_groups, "memory_left", lambda: job)
    folder = made(replace(CONFIG, cache="memory", cache_dir=None))
    assert folder.path == Path("memory") / NAME
    assert folder.plan(999, 1) == (f"--cache memory is to keep about 0.00 GB in 1 files in memory/{NAME}", None)
    assert str(folder.plan(1000, 1)[1]).startswith("--cache memory: the reduced images need about")
    with pytest.raises(OSError, match="what is free there is left to others"):
        folder.check_takes(1000)
    assert made().plan(1000, 1)[1] is None  # on a disk


def test_where_images_are_kept_if_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the user's own folder for such things; who has no home must name one, and only then."""
    unsaid = replace(CONFIG, cache_dir=None)
    monkeypatch.setenv("XDG_CACHE_HOME", "there")
    assert made(unsaid).path == Path("there") / NAME
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    assert made(unsaid).path == Path("home").absolute() / ".cache" / NAME
    assert Path("/dev/shm") == cache_folder._MEMORY

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert made().path == Path("cache") / NAME
    with pytest.raises(UsageError, match="no home folder for it; name a --cache-dir"):
        made(unsaid)
