"""A command line, as a user types it."""

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from hvd_train import cli

Command = Callable[..., Any]  # what the fixture `command` returns


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command, asserts its exit code, and returns its output."""

    def run(line: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert cli.run(shlex.split(line)) == code
        return capsys.readouterr()

    return run
