"""A machine on which nothing is installed."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def system_only(tmp_path: Path) -> str:
    """Return a PATH with the system's tools and without horovodrun."""
    folder = tmp_path / "system only"
    folder.mkdir()
    for name in ("bash", "dirname", "env", "grep", "nproc", "readlink", "sed", "tr"):
        found = shutil.which(name)
        assert found, f"this machine has no {name}"
        (folder / name).symlink_to(found)
    return str(folder)
