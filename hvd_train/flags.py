"""Read command line flags into a dataclass or one by one. An error is one line with the nearest flag."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import tyro

from hvd_train.config import Config
from hvd_train.errors import UsageError, unknown_name, whole_number

T = TypeVar("T")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Open MPI gives ranks a terminal


def parse_flags(cls: type[T], arguments: Sequence[str], program: str, default: T | None = None) -> T:
    """Make a dataclass of command line flags, one for each field; the help names `program`.

    Other fields keep the values of `default` or the class. Raises UsageError in one line; SystemExit after `--help`.
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
        names = Config().settings() if cls is Config else [field.name for field in dataclasses.fields(cast(Any, cls))]
        known = [f"--{name.replace('_', '-')}" for name in names]
        raise unknown_name("argument", unknown[0].partition("=")[0], [*known, "--config", "--help"])
    return value


def take(arguments: list[str], flag: str, needs: str) -> tuple[str | None, list[str]]:
    """Take a flag and its value, `--flag value` or `--flag=value`, out of the arguments of a command.

    Returns the value or None, and the other arguments. Raises UsageError without a value; `needs` says what is needed.
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
    """Take a flag without a value out of the arguments; return whether it was there, and the other arguments."""
    return flag in arguments, [argument for argument in arguments if argument != flag]


def take_number(arguments: list[str], flag: str, default: int) -> tuple[int, list[str]]:
    """Take a flag with a number from 1 to below a billion, as `take` does; without the flag it is `default`."""
    text, arguments = take(arguments, flag, "a number")
    if text is None:
        return default, arguments
    number = whole_number(text)
    if number is None or not 1 <= number < 10**9:
        raise UsageError(f"{flag} {text}: it must be a whole number from 1 on")
    return number, arguments


def _one_line(report: str) -> str:
    """Return the message of tyro's report: the text between its title and its hints."""
    blocks: list[list[str]] = [[]]
    for line in _COLOURS.sub("", report).splitlines()[1:]:
        words = line.strip(" │")
        if words and not set(words) <= set("-─╭╮╰╯"):
            blocks[-1].append(words)
        elif blocks[-1]:
            blocks.append([])
    return " ".join(blocks[0]).removeprefix("Error parsing ") or "the arguments cannot be read; see --help"
