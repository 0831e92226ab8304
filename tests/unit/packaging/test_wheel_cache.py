"""The cache of wheels of the builder."""

import os
import stat
from pathlib import Path

import pytest
from horovod_build.cache import cache_folder, cached_wheel, publish
from horovod_build.machine import BuildError

DAMAGES = {
    "another byte": lambda wheel: wheel.write_bytes(b"W" + wheel.read_bytes()[1:]),
    "no wheel": Path.unlink,
    "no record": lambda wheel: wheel.with_name("wheel.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_wheel_counts_as_absent_and_is_replaced(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fresh = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    fresh.write_bytes(b"wheel" * 1000)
    wheel = publish("key", fresh, {"torch": "2.15"})
    assert cached_wheel("key") == wheel
    DAMAGES[damage](wheel)
    assert cached_wheel("key") is None
    publish("key", fresh, {})
    assert cached_wheel("key") == wheel
    assert wheel.read_bytes() == fresh.read_bytes()
    assert {path.name for path in wheel.parent.iterdir()} == {fresh.name, "wheel.json"}


def test_the_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can neither plant a wheel nor redirect the build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hvd_train"
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700

    def is_refused(says: str) -> None:
        with pytest.raises(BuildError, match=says):
            cache_folder()

    tmp_path.chmod(0o777)
    is_refused("any user can rename")
    tmp_path.chmod(0o1777)
    folder.chmod(0o775)
    is_refused(f"other users can write to {folder}, .*XDG_CACHE_HOME=")
    folder.chmod(0o755)
    cache_folder()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 65534)
        is_refused(f"{folder} belongs to user ")
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    is_refused(f"{folder} is a symlink")
