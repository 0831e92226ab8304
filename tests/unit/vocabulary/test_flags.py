"""Flags, read into a dataclass or one by one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags, take, take_number


@dataclass(frozen=True)
class Options:
    """What a command takes."""

    num_rows: int = 3
    """How many rows."""
    title: str = "none"
    """What stands above."""


def test_flags_become_the_fields_of_a_dataclass() -> None:
    """What is not typed comes from the default, or else from the class."""
    assert parse_flags(Options, ["--num-rows", "5"], "table") == Options(num_rows=5)
    assert parse_flags(Options, ["--num-rows=5"], "table", Options(title="mine")) == Options(5, "mine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-row", "5"], "unknown argument '--num-row'; did you mean '--num-rows'?"),
        (["--num-rows", "many"], "many"),
        (["--num-rows"], "num-rows"),
        (["left-over"], "unknown argument 'left-over'"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the frame and the colours of the parser's own report."""
    with pytest.raises(UsageError) as caught:
        parse_flags(Options, arguments, "table")
    assert message in str(caught.value)
    assert not set("\n│╭\x1b") & set(str(caught.value))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("typed", [["--np", "4"], ["--np=4"]])
def test_a_flag_is_taken_out_of_the_arguments(typed: list[str]) -> None:
    """What is left is for another parser; the arguments themselves stay as they were."""
    arguments = ["digits", *typed, "--epochs", "3"]
    assert take(arguments, "--np", "a number") == ("4", ["digits", "--epochs", "3"])
    assert take_number(arguments, "--np", 1) == (4, ["digits", "--epochs", "3"])
    assert arguments == ["digits", *typed, "--epochs", "3"]


def test_a_flag_that_was_not_typed_has_its_default() -> None:
    """And nothing is taken out, of flags that only begin alike neither."""
    assert take(["--np-more", "4"], "--np", "a number") == (None, ["--np-more", "4"])
    assert take_number(["digits"], "--np", 7) == (7, ["digits"])
    assert take(["--json="], "--json", "a file") == ("", [])


def test_a_flag_without_its_value_is_refused() -> None:
    """The error says what belongs there."""
    with pytest.raises(UsageError, match=r"^--json needs the path of a file$"):
        take(["digits", "--json"], "--json", "the path of a file")


@pytest.mark.parametrize("text", ["1", "1000000000", "x"])
def test_a_number_has_bounds(text: str) -> None:
    """From the least that the flag takes to below a billion."""
    with pytest.raises(UsageError, match=f"^--np {text}: it must be a whole number from 2 on$"):
        take_number(["--np", text], "--np", 2, least=2)
