"""Every command can be found by its name, and says what it takes."""

from __future__ import annotations

import pytest

from hvd_train import cli
from hvd_train.commands import bench
from hvd_train.commands.registry import COMMANDS, command

PAGES = [[name, "--help"] for name in COMMANDS] + [["bench", tool, "--help"] for tool in bench.TOOLS]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_with_its_usage(name: str) -> None:
    """The overview has its line, and it can be run."""
    found = command(name)
    assert found.USAGE.startswith(f"  {name} ")
    assert found.USAGE in cli.overview()
    assert callable(found.run)


@pytest.mark.parametrize("typed", [["--help"], ["train", "imagenet-resnet50", "-h"], *PAGES], ids=" ".join)
def test_every_help_fits_a_terminal(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """80 columns are enough, and the first line says what to type."""
    assert cli.run(typed) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert lines[0].startswith(f"usage: hvd-train {'COMMAND' if typed[0] == '--help' else typed[0]}")


@pytest.mark.parametrize("name", ["config", "show-data", "sweep", "tune", "bench throughput"])
def test_what_trains_takes_the_settings_of_a_training(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own flags are listed; for the others the page says where to look."""
    assert cli.run([*name.split(), "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Every setting of a training is a flag here, too: `hvd-train help train` lists them." in told
    assert "--epochs INT" not in told
