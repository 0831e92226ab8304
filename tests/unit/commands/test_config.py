"""`hvd-train config`: settings, checked and printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import cli, recipes
from hvd_train.commands.train import parse_train


def test_settings_are_checked_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`hvd-train config` gives what --config takes; a name that does not exist is told."""
    assert cli.run(["config", "digits", "--lr", "0.5"]) == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    assert parse_train(["--config", "run.yaml"]) == recipes.get("digits").replace(learning_rate=0.5)
    assert cli.run(["config", "digits", "--data", "digit"]) == 2
    assert "did you mean 'digits'?" in capsys.readouterr().err
