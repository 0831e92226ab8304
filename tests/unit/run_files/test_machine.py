"""What environment.json and the records of benchmarks say about the machine."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest

from hvd_train import __version__
from hvd_train.run_files import machine


def test_environment_json_has_the_command_the_hosts_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments with blanks are quoted, so that the command can be pasted; ranks are counted by host."""
    monkeypatch.setattr(sys, "argv", ["/env/bin/hvd-train", "train", "--output-dir", "my run"])
    machine.write(Path(), ["h1", "h1", "h2"], "NVIDIA A100")
    found = json.loads(Path("environment.json").read_text())
    assert found["command"] == "hvd-train train --output-dir 'my run'"
    assert (found["world_size"], found["ranks_of_hosts"]) == (3, {"h1": 2, "h2": 1})
    assert found["device"] == "NVIDIA A100"
    assert found["versions"]["hvd_train"] == __version__


def test_without_a_gpu_the_device_is_the_processor() -> None:
    """The name of the processor is never empty."""
    assert machine.environment(["h1"], None)["device"] == machine.processor() != ""


def test_packages_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Horovod or torch still says which Python it has."""

    def absent(name: str) -> str:
        raise machine.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "version", absent)
    assert machine.versions() == {"hvd_train": __version__, "python": platform.python_version()}
