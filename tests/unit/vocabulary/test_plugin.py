"""The user's own code, found by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_train import plugin
from hvd_train.errors import UsageError


@pytest.fixture
def own() -> Iterator[str]:
    """A module in the folder that the command is started from."""
    Path("my_networks.py").write_text("def linear(classes):\n    return classes + 1\nvalue = 3\n")
    yield "my_networks"
    sys.modules.pop("my_networks", None)


def test_own_code_is_found_in_the_current_folder(own: str) -> None:
    """A console script does not have that folder on its import path."""
    assert plugin.is_reference(f"{own}:linear")
    assert not plugin.is_reference("resnet18")
    assert plugin.load("model", f"{own}:linear")(10) == 11


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("my_networks:lineer", "unknown function in my_networks for --model 'lineer'; did you mean 'linear'"),
        ("my_networks:value", "unknown function in my_networks for --model 'value'"),
        ("no_such_module:f", "--model no_such_module:f: cannot import no_such_module: No module named"),
        (":f", "cannot import"),
    ],
)
def test_own_code_that_cannot_be_found_is_an_error_of_use(own: str, reference: str, message: str) -> None:
    """The module, the function and the reason are in one line."""
    with pytest.raises(UsageError, match=message) as caught:
        plugin.load("model", reference)
    assert "\n" not in str(caught.value)


def test_own_code_that_fails_when_imported_is_an_error_of_use() -> None:
    """Whatever it raises, a syntax error too."""
    Path("broken_networks.py").write_text("def f(:\n")
    with pytest.raises(UsageError, match="cannot import broken_networks: invalid syntax"):
        plugin.load("model", "broken_networks:f")


def test_code_that_a_file_names_is_not_trusted() -> None:
    """Names of torchvision and timm are no code; a module and a function are, and the line says what to type."""
    plugin.check_trusted("run", {"model": "resnet18", "data": "folder"})
    plugin.check_trusted("run", {"model": "timm:vit_tiny_patch16_224"})
    with pytest.raises(plugin.Untrusted, match=r"run names code \(data: mine:data\).*add --trust"):
        plugin.check_trusted("run", {"model": "resnet18", "data": "mine:data"})
