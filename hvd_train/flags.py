"""Command line flags, read into a dataclass or one by one. What cannot be read is one line with the nearest flag."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from hvd_train.config import GROUPS, Config
from hvd_train.errors import UsageError, unknown_name
from hvd_train.numerals import whole_number

T = TypeVar("T")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Open MPI gives ranks a terminal


def parse_flags(cls: type[T], arguments: Sequence[str], program: str, default: T | None = None) -> T:
    """Make a dataclass of command line flags, one for each field; `program` is named in the help.

    Fields that are not typed have the values of `default`, or else those of the class. Raises UsageError, in one line,
    for an unknown flag (with the nearest one) and for a value that cannot be; SystemExit after `--help`.
    """
    options: dict[str, Any] = {"prog": program, "config": (tyro.conf.OmitArgPrefixes,)}
    if default is not None:
        options["default"] = default
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            parsed: tuple[T, list[str]] = tyro.cli(cls, args=arguments, return_unknown_args=True, **options)
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
        raise UsageError(_one_line(report.getvalue())) from None
    value, unknown = parsed
    if unknown:
        known = [f"--{name.replace('_', '-')}" for name in _field_names(cls)]
        raise unknown_name("argument", unknown[0].partition("=")[0], [*known, "--config", "--help"])
    return value


def take(arguments: list[str], flag: str, needs: str) -> tuple[str | None, list[str]]:
    """Take a flag and its value, `--flag value` or `--flag=value`, out of the arguments.

    Returns the value, None if the flag was not typed, and the arguments that are left. This is for flags that belong
    to a command and not to the dataclass it parses. Raises UsageError if the value is missing; `needs` says what
    the flag wants, as in "the path of a file".
    """
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2], arguments[:index] + arguments[index + 1 :]
        if argument == flag:
            if index + 1 == len(arguments):
                raise UsageError(f"{flag} needs {needs}")
            return arguments[index + 1], arguments[:index] + arguments[index + 2 :]
    return None, arguments


def take_switch(arguments: list[str], flag: str) -> tuple[bool, list[str]]:
    """Take a flag without a value out of the arguments; return whether it was typed, and the arguments left."""
    return flag in arguments, [argument for argument in arguments if argument != flag]


def take_number(arguments: list[str], flag: str, default: int) -> tuple[int, list[str]]:
    """Take a flag that holds a whole number out of the arguments, as `take` does, and return the number.

    `default` stands in for a flag that was not typed. Raises UsageError if the value is missing, or is anything but
    digits that write a number from 1 to below a billion.
    """
    text, arguments = take(arguments, flag, "a number")
    if text is None:
        return default, arguments
    number = whole_number(text)
    if number is None or not 1 <= number < 10**9:
        raise UsageError(f"{flag} {text}: it must be a whole number from 1 on")
    return number, arguments


def _field_names(cls: Any) -> list[str]:
    """Return the names of a dataclass's fields; for Config, the names of the fields of its groups."""
    names = []
    for field in dataclasses.fields(cls):
        group = GROUPS.get(field.name) if cls is Config else None
        names += _field_names(group) if group else [field.name]
    return names


def _one_line(report: str) -> str:
    """Return the message in tyro's report: the first block of text between its title and its hints."""
    blocks: list[list[str]] = [[]]
    for line in _COLOURS.sub("", report).splitlines()[1:]:
        words = line.strip(" │")
        if words and not set(words) <= set("-─╭╮╰╯"):
            blocks[-1].append(words)
        elif blocks[-1]:
            blocks.append([])
    return " ".join(blocks[0]).removeprefix("Error parsing ") or "the arguments cannot be read; see --help"
