"""The folders of the builder: the cache of wheels, and the folder for temporary files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from horovod_build import workshop
from horovod_build.cache import WheelCache, cache_folder
from horovod_build.errors import BuildError


@pytest.fixture
def cache(tmp_path: Path) -> WheelCache:
    cache = WheelCache(tmp_path / "wheels")
    wheel = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"wheel" * 1000)
    cache.publish("key", wheel, {"torch": "2.15"})
    return cache


def test_cache_returns_what_was_put_in(cache: WheelCache) -> None:
    """A wheel that was published is found under its key and no other."""
    found = cache.wheel("key")
    assert found is not None
    assert found.read_bytes() == b"wheel" * 1000
    assert cache.wheel("another") is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove wheel", "remove record", "spoil record"])
def test_damaged_wheel_counts_as_absent(cache: WheelCache, damage: str) -> None:
    """A truncated, changed or half-removed entry is not used."""
    wheel = cache.wheel("key")
    record = wheel.with_name("wheel.json")
    if damage == "truncate":
        wheel.write_bytes(wheel.read_bytes()[:100])
    elif damage == "flip":
        wheel.write_bytes(b"W" + wheel.read_bytes()[1:])
    elif damage == "remove wheel":
        wheel.unlink()
    elif damage == "remove record":
        record.unlink()
    else:
        record.write_text("[]")
    assert cache.wheel("key") is None


def test_publishing_replaces_a_damaged_wheel(cache: WheelCache, tmp_path: Path) -> None:
    """A new build takes the place of a damaged wheel, and no part of that one stays."""
    cache.wheel("key").write_bytes(b"")
    fresh = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    cache.publish("key", fresh, {})
    assert cache.wheel("key").read_bytes() == fresh.read_bytes()
    assert [path.name for path in cache.folder.iterdir()] == ["key"]


def test_a_build_left_halfway_does_not_count(cache: WheelCache) -> None:
    """A build that was killed leaves a .part folder, which is not taken for a wheel."""
    (cache.folder / "other.part").mkdir()
    assert cache.wheel("other") is None


def test_lock_admits_one_build_at_a_time(cache: WheelCache) -> None:
    """While one process holds a key, another cannot take it."""
    path = cache.folder / "key.lock"
    probe = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with cache.lock("key"):
        inside = subprocess.run([sys.executable, "-c", probe, str(path)], capture_output=True, check=False)
    after = subprocess.run([sys.executable, "-c", probe, str(path)], capture_output=True, check=False)
    assert inside.returncode != 0
    assert after.returncode == 0


def of_another_user(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let these files and folders belong to user 65534, as `lstat` tells it; only root could give them away."""
    usual = os.lstat

    def lstat(path: Path) -> os.stat_result:
        status = list(usual(path))
        if Path(path) in paths:
            status[stat.ST_UID] = 65534
        return os.stat_result(status)

    monkeypatch.setattr(os, "lstat", lstat)


def test_the_cache_is_its_users_alone(cache: WheelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders and files are made for their owner alone, and those of an earlier version become so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    (tmp_path / "shared" / "hvd_train").mkdir(parents=True, mode=0o775)
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    wheel = cache.wheel("key")
    for path in (cache.folder, wheel.parent, wheel, wheel.with_name("wheel.json")):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("planted", ["folder", "wheels", "entry", "wheel", "record"])
def test_what_another_user_has_planted_is_refused(
    planted: str, cache: WheelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel runs as whoever installs it: one line says whose it is and what to type, and nothing of it is used."""
    cache_home = cache.folder.parent
    (cache_home / "hvd_train").mkdir()
    cache.folder = cache.folder.rename(cache_home / "hvd_train" / "wheels")
    wheel = cache.wheel("key")
    places = {
        "folder": cache_home / "hvd_train",
        "wheels": cache.folder,
        "entry": wheel.parent,
        "wheel": wheel,
        "record": wheel.with_name("wheel.json"),
    }
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    of_another_user(monkeypatch, places[planted])
    with pytest.raises(BuildError) as caught:
        WheelCache().wheel("key")
    assert str(caught.value).startswith(f"{places[planted]} belongs to ")
    assert "65534" in str(caught.value)
    assert "XDG_CACHE_HOME=" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("planted", ["hvd_train", "hvd_train/wheels", "hvd_train/wheels/key"])
def test_links_in_the_cache_are_not_followed(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link could lead into a folder of somebody else, or make a build overwrite what it leads to."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / planted
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=f"{link} is a link") as caught:
        WheelCache().wheel("key")
    assert "\n" not in str(caught.value)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("open_to_others", ["wheel", "record"])
def test_a_wheel_that_others_could_write_to_counts_as_damaged(open_to_others: str, cache: WheelCache) -> None:
    """Nor does a digest prove anything that others could write."""
    wheel = cache.wheel("key")
    (wheel if open_to_others == "wheel" else wheel.with_name("wheel.json")).chmod(0o664)
    assert cache.wheel("key") is None


def test_a_cache_that_anybody_may_replace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder like /tmp, but without its sticky bit, others could put a folder in the place of ours at any time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(BuildError, match=r"may be renamed by anybody.*chmod \+t"):
        WheelCache()
    tmp_path.chmod(0o1777)
    WheelCache()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_a_wheel_of_nobody_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack itself: user 65534 makes the cache in a folder that all may write to, before its victim does."""
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o001)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    planted = shared / "hvd_train" / "wheels" / "key"
    text = f"""mkdir -m 777 -p '{planted}' && cd '{planted}' && echo evil >evil.whl &&
        echo '{{"file": "evil.whl", "sha256": "'$(sha256sum evil.whl | cut -d' ' -f1)'"}}' >wheel.json"""
    subprocess.run(["sh", "-c", text], check=True, user=65534, group=65534, extra_groups=[])
    with pytest.raises(BuildError, match=r"belongs to .*65534"):
        WheelCache().wheel("key")


def test_too_little_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of disk space is found before anything is fetched."""
    monkeypatch.setattr(workshop, "NEEDED_DISK_MB", 10**9)
    with pytest.raises(BuildError, match=r"too little room.*TMPDIR"):
        workshop.build_folder()


def test_temporary_files_avoid_a_path_with_a_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder chooses a temporary folder without blanks, since make and CMake split paths at them."""
    blank = tmp_path / "with blank"
    blank.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(blank))
    monkeypatch.setattr(workshop, "NEEDED_DISK_MB", 0)
    assert " " not in str(workshop.build_folder())
