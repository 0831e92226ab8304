"""Which hvd_train this is."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hvd_train import _version


def test_the_digest_changes_with_any_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkouts of one version are told apart where a file is edited, added or moved."""
    package = tmp_path / "hvd_train"
    shutil.copytree(Path(_version.__file__).parent, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    assert re.fullmatch("[0-9a-f]{12}", _version.digest_of_code())
    before = _version.digest_of_code()
    monkeypatch.setattr(_version, "__file__", str(package / "_version.py"))
    assert _version.digest_of_code() == before
    (package / "bench" / "record.py").rename(package / "bench" / "records.py")
    assert _version.digest_of_code() != before
