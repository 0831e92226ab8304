"""Whole numbers are read in one way, whichever command they are typed to."""

from __future__ import annotations

import pytest

from hvd_train import cli

# Superscript two is a digit for `str.isdigit`; Arabic one is a number for `int`; 5,000 digits are too many for `int`.
NO_NUMBERS = ("²", "١", "2.5", "-1", "", " 1", "1_0", "x", "9" * 5000)
FLAGS = [
    ("show-data", "--ranks"),
    ("sweep", "--workers-per-run"),
    ("tune", "--np"),
    ("tune", "--turns"),
    ("tune", "--seconds"),
    ("bench throughput", "--steps"),
    ("bench throughput", "--repetitions"),
    ("bench batch", "--from"),
    ("bench batch", "--to"),
    ("bench batch", "--seconds"),
    ("bench batch", "--repetitions"),
    ("bench allreduce", "--repetitions"),
    ("bench input", "--seconds"),
    ("bench input", "--repetitions"),
    ("bench scaling", "--np"),
]


@pytest.mark.parametrize("text", NO_NUMBERS, ids=lambda text: ascii(text[:5]))
@pytest.mark.parametrize(("command", "flag"), FLAGS)
@pytest.mark.parametrize("joined", [False, True])
def test_what_is_no_whole_number_is_one_line(
    command: str, flag: str, text: str, joined: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 with the flag and what was typed, however it was typed; nothing is started."""
    assert cli.run([*command.split(), *([f"{flag}={text}"] if joined else [flag, text])]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"hvd-train: {flag} {text}: ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("text", ["²", "2.5", "x"])
@pytest.mark.parametrize("flag", ["--epochs", "--workers", "--commit-steps", "--gpu-ids"])
def test_settings_that_are_no_whole_numbers_are_one_line(
    flag: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for the flags of a training."""
    assert cli.run(["config", "digits", flag, text]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hvd-train: ")
    assert text in printed.err
    assert printed.err.count("\n") == 1
