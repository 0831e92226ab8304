"""The folders of the builder: the cache of wheels, and the folder for temporary files."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from horovod_build import workshop
from horovod_build.cache import WheelCache
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
