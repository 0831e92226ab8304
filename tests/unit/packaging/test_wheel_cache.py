"""The cache of wheels of the builder."""

import os
import stat
from pathlib import Path

import pytest
from horovod_build.cache import cache_folder, cached_wheel, publish
from horovod_build.machine import BuildError


@pytest.mark.parametrize("damage", ["truncate", "flip", "no wheel", "no record"])
def test_a_damaged_wheel_counts_as_absent_and_is_replaced(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fresh = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    content = b"wheel" * 1000
    fresh.write_bytes(content)
    wheel = publish("key", fresh, {"torch": "2.15"})
    assert cached_wheel("key") == wheel
    assert wheel.read_bytes() == content
    if damage == "no record":
        wheel.with_name("wheel.json").unlink()
    elif damage == "no wheel":
        wheel.unlink()
    else:
        wheel.write_bytes({"truncate": content[:100], "flip": b"W" + content[1:]}[damage])
    assert cached_wheel("key") is None
    publish("key", fresh, {})
    assert cached_wheel("key") == wheel
    assert wheel.read_bytes() == content
    assert sorted(path.name for path in wheel.parent.iterdir()) == [wheel.name, "wheel.json"]


def test_the_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can neither plant a wheel nor redirect the build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hvd_train"
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    tmp_path.chmod(0o777)
    with pytest.raises(BuildError, match="any user can rename"):
        cache_folder()
    tmp_path.chmod(0o1777)
    folder.chmod(0o775)
    with pytest.raises(BuildError, match=f"other users can write to {folder}, .*XDG_CACHE_HOME="):
        cache_folder()
    folder.chmod(0o755)
    cache_folder()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 65534)
        with pytest.raises(BuildError, match=f"{folder} belongs to user "):
            cache_folder()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match=f"{folder} is a symlink"):
        cache_folder()
