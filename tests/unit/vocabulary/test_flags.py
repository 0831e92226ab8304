"""Flags, exit codes, code of the user, and the digest of the package."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from hvd_train import _version, errors, plugin
from hvd_train.errors import TYPES, HvdTrainError, UsageError


def test_files_may_follow_flags() -> None:
    parser = errors.Parser()
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--output")
    found = parser.read(["a", "--output", "b", "c", "b"])
    assert (found.runs, found.output) == (["a", "c", "b"], "b")


def test_each_error_has_its_own_exit_code_and_can_be_sent() -> None:
    """The other ranks raise it too."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, HvdTrainError)
    ]
    own = [kind.exit_code for kind in kinds if "exit_code" in vars(kind)]
    assert sorted(own) == [1, 2, 3, 4, 5, 6, 7]
    assert {*kinds} <= {*TYPES}


def test_own_code_is_found_in_the_current_folder() -> None:
    """An error of its import is one line."""
    Path("my_networks.py").write_text("def linear(classes):\n    return classes + 1\nvalue = 3\n")
    Path("failing_networks.py").write_text("\nnothing\n")
    Path("ending_networks.py").write_text("raise SystemExit(2)\n")
    assert plugin.load("model", "my_networks:linear")(10) == 11
    for reference, message in {
        "failing_networks:f": "'nothing' is not defined .*failing_networks.py, line 2, in <module>",
        "ending_networks:f": (
            r"cannot import ending_networks: it calls "
            r"sys.exit\(2\) .*ending_networks.py, line 1"
        ),
        "./lib/mine:f": r"name a module, not a file: mine:f, with PYTHONPATH=\./lib",
    }.items():
        with pytest.raises(UsageError, match=message) as caught:
            plugin.load("model", reference)
        assert "\n" not in str(caught.value)
    sys.modules.pop("my_networks")


def test_own_functions_take_a_value_in_any_way() -> None:
    """By name, by position, or without; a function that wants more is named, with what to write."""
    for function in (
        lambda num_classes=3: num_classes,
        lambda n: n,
        lambda **named: named["num_classes"],
        lambda: 10,
    ):
        assert plugin.call("--model m:f", function, "num_classes", 10) == 10
    assert plugin.call("--model m:f", lambda width=64: width, "num_classes", 10) == 64

    def net(*, width: int) -> None: ...

    with pytest.raises(
        UsageError,
        match=r"--model m:f: net must accept num_classes: write `def net\(num_classes\)`",
    ):
        plugin.call("--model m:f", net, "num_classes", 10)


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
