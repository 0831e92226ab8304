"""The folders of the builder: the cache of wheels, and the folder for temporary files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from horovod_build.cache import WheelCache, cache_folder
from horovod_build.errors import BuildError


@pytest.fixture
def cache(tmp_path: Path) -> WheelCache:
    cache = WheelCache(tmp_path / "wheels")
    wheel = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"wheel" * 1000)
    cache.publish("key", wheel, {"torch": "2.15"})
    return cache


@pytest.mark.parametrize("damage", ["truncate", "flip", "no wheel", "no record", "open wheel", "open record"])
def test_a_damaged_wheel_counts_as_absent_and_is_replaced(cache: WheelCache, damage: str, tmp_path: Path) -> None:
    fresh = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel = cache.wheel("key")
    assert wheel.read_bytes() == fresh.read_bytes()
    record = wheel.with_name("wheel.json")
    if damage == "truncate":
        wheel.write_bytes(wheel.read_bytes()[:100])
    elif damage == "flip":
        wheel.write_bytes(b"W" + wheel.read_bytes()[1:])
    elif damage.startswith("no"):
        (wheel if damage == "no wheel" else record).unlink()
    else:
        (wheel if damage == "open wheel" else record).chmod(0o664)
    assert cache.wheel("key") is None
    cache.publish("key", fresh, {})
    assert cache.wheel("key").read_bytes() == fresh.read_bytes()
    assert [path.name for path in cache.folder.iterdir()] == ["key"]


def test_one_build_of_a_key_at_a_time(cache: WheelCache) -> None:
    probe = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", probe, str(cache.folder / "key.lock")]
    with cache.lock("key"):
        assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_cache_is_private(cache: WheelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    (tmp_path / "shared" / "hvd_train").mkdir(parents=True, mode=0o775)
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    wheel = cache.wheel("key")
    for path in (cache.folder, wheel.parent, wheel, wheel.with_name("wheel.json")):
        assert path.stat().st_mode & 0o077 == 0, path
    # In a folder like /tmp without its sticky bit another user could replace our folder.
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(BuildError, match=r"may be renamed by anybody.*chmod \+t"):
        WheelCache()
    (tmp_path / "shared").chmod(0o1777)
    WheelCache()


@pytest.mark.parametrize("planted", ["", "wheels", "wheels/key", "wheels/key/wheel.json"])
def test_files_of_another_user_are_refused(
    planted: str, cache: WheelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "hvd_train"
    home.mkdir(parents=True)
    cache.folder.rename(home / "wheels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parent))
    usual = os.lstat

    def lstat(path: Path) -> os.stat_result:  # only root could give the file away
        status = list(usual(path))
        if Path(path) == home / planted:
            status[stat.ST_UID] = 65534
        return os.stat_result(status)

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.raises(BuildError, match=rf"^{home / planted} belongs to .*65534.*XDG_CACHE_HOME=") as caught:
        WheelCache().wheel("key")
    assert "\n" not in str(caught.value)


def test_symlinks_in_the_cache_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link could make a build overwrite what it leads to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    elsewhere, link = tmp_path / "elsewhere", tmp_path
    elsewhere.mkdir()
    for name in ("hvd_train", "wheels", "key"):
        link /= name
        link.symlink_to(elsewhere)
        with pytest.raises(BuildError, match=f"^{link} is a link"):
            WheelCache().wheel("key")
        assert not list(elsewhere.iterdir())
        link.unlink()
        link.mkdir()
