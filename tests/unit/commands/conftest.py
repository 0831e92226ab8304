"""A command line, as a user types it."""

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from hvd_train import cli
from hvd_train.report.page import Chart

Command = Callable[..., Any]  # what the fixture `command` returns


def typed_and_printed(text: str) -> dict[str, str]:
    """Return the command lines of a text, which begin with $, and the line below each."""
    return dict(re.findall(r"^\$ (.*)\n(.*)", text, re.MULTILINE))


@pytest.fixture
def _no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chart, "shown", lambda chart: (b"", "{}"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command, asserts its exit code, and returns its output."""

    def run(line: str, code: int = 0) -> Any:
        capsys.readouterr()
        try:
            found = cli.run(shlex.split(line))
        except SystemExit as ended:  # after a help
            found = ended.code
        assert found == code
        return capsys.readouterr()

    return run
