"""Flags, exit codes, code of the user, and the digest of the package."""

import re
import shutil
from pathlib import Path

import pytest

from hvd_train import _version, errors, plugin
from hvd_train.errors import TYPES, HvdTrainError


def test_each_error_has_its_own_exit_code_and_can_be_sent() -> None:
    """The other ranks raise it too."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = {kind for kind in found if issubclass(kind, HvdTrainError)}
    own = [kind.exit_code for kind in kinds if "exit_code" in vars(kind)]
    assert sorted(own) == [1, 2, 3, 4, 5, 6, 7]
    assert kinds <= {*TYPES}


def test_own_functions_take_a_value_in_any_way() -> None:
    """By name, by position, or without."""
    for function in (
        lambda num_classes=3: num_classes,
        lambda n: n,
        lambda **named: named["num_classes"],
        lambda: 10,
    ):
        assert plugin.call("--model m:f", function, "num_classes", 10) == 10
    assert plugin.call("--model m:f", lambda width=64: width, "num_classes", 10) == 64


def test_the_digest_of_the_code_changes_with_any_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It distinguishes two checkouts of one version."""
    package = tmp_path / "hvd_train"
    shutil.copytree(Path(_version.__file__).parent, package)
    before = _version.digest_of_code()
    assert re.fullmatch("[0-9a-f]{12}", before)
    monkeypatch.setattr(_version, "__file__", str(package / "_version.py"))
    assert _version.digest_of_code() == before
    (package / "loop.py").rename(package / "loops.py")
    assert _version.digest_of_code() != before
