"""The cache of wheels of the builder."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from horovod_build.cache import WheelCache, cache_folder
from horovod_build.machine import BuildError


@pytest.fixture
def cache(tmp_path: Path) -> WheelCache:
    cache, wheel = WheelCache(tmp_path / "wheels"), tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"wheel" * 1000)
    cache.publish("key", wheel, {"torch": "2.15"})
    return cache


@pytest.mark.parametrize("damage", ["truncate", "flip", "no wheel", "no record"])
def test_a_damaged_wheel_counts_as_absent_and_is_replaced(cache: WheelCache, damage: str) -> None:
    fresh, wheel = Path("horovod-0.28.1-py3-none-any.whl"), cache.wheel("key")
    content = fresh.read_bytes()
    assert wheel.read_bytes() == content
    if damage == "no record":
        wheel.with_name("wheel.json").unlink()
    elif damage == "no wheel":
        wheel.unlink()
    else:
        wheel.write_bytes({"truncate": content[:100], "flip": b"W" + content[1:]}[damage])
    assert cache.wheel("key") is None
    cache.publish("key", fresh, {})
    assert cache.wheel("key").read_bytes() == content
    assert [path.name for path in cache.folder.iterdir()] == ["key"]


def test_one_build_of_a_key_at_a_time(cache: WheelCache) -> None:
    probe = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", probe, str(cache.folder / "key.lock")]
    with cache.lock("key"):
        assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can neither plant a wheel nor redirect the build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hvd_train"
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    tmp_path.chmod(0o777)
    with pytest.raises(BuildError, match="any user can rename"):
        WheelCache()
    tmp_path.chmod(0o1777)
    folder.chmod(0o775)
    with pytest.raises(BuildError, match=f"other users can write to {folder}, .*XDG_CACHE_HOME="):
        WheelCache()
    folder.chmod(0o755)
    WheelCache()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 65534)
        with pytest.raises(BuildError, match=f"{folder} belongs to user "):
            WheelCache()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match=f"{folder} is a symlink"):
        WheelCache()
