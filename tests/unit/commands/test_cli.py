"""The command line: the chosen command, its output and its exit code."""

import re
import signal
from unittest.mock import Mock

import pytest

from hvd_train import cli
from hvd_train.errors import RankLost


def test_usage_and_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert (cli.run([]), cli.run(["--help"])) == (2, 0)
    assert "train [RECIPE]" in capsys.readouterr().out
    assert cli.run(["--version"]) == 0
    assert re.fullmatch(r"hvd-train \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert cli.run(["trian"]) == 2
    assert capsys.readouterr().err == "hvd-train: unknown command 'trian'; did you mean 'train'?\n"


def test_an_error_is_a_line_and_a_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hvd_train.commands.runs.audit", Mock(side_effect=[RankLost("no rank 7"), KeyboardInterrupt]))
    assert cli.run(["audit", "7"]) == RankLost.exit_code == 3
    assert capsys.readouterr().err == "hvd-train: no rank 7\n"
    assert cli.run(["audit"]) == 128 + signal.SIGINT


# `str.isdigit` accepts superscript two; `int` accepts Arabic one, but not 5,000 digits.
@pytest.mark.parametrize(
    ("words", "flag", "text"),
    [
        ("show-data", "--ranks", "²"),
        ("sweep", "--workers-per-run", "١"),
        ("bench input", "--seconds", "9" * 5000),
        ("bench scaling", "--np", "1_0"),
        ("watch run", "--interval", "nan"),
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_a_wrong_number_is_one_line(words: str, flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for typed in ([f"{flag}={text}"], [flag, text]):
        assert cli.run([*words.split(), *typed]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"hvd-train: {flag} {text}")
        assert printed.err.count("\n") == 1
