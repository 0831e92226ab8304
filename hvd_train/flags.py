"""Command line flags into a dataclass. What cannot be read becomes one line with the nearest flag."""

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

T = TypeVar("T")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Open MPI gives ranks a terminal


def parse_flags(cls: type[T], arguments: Sequence[str], program: str, default: T | None = None) -> T:
    """A dataclass from command line flags. Raises UsageError in one line, with the nearest flag."""
    options: dict[str, Any] = {"prog": program, "config": (tyro.conf.OmitArgPrefixes,)}
    if default is not None:
        options["default"] = default
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            parsed: tuple[T, list[str]] = tyro.cli(cls, args=arguments, return_unknown_args=True, **options)
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
        raise UsageError(_one_line(told.getvalue())) from None
    value, unknown = parsed
    if unknown:
        known = [f"--{name.replace('_', '-')}" for name in _field_names(cls)]
        raise unknown_name("argument", unknown[0].partition("=")[0], [*known, "--config", "--help"])
    return value


def taken(arguments: list[str], flag: str, what: str) -> tuple[str | None, list[str]]:
    """The value of a flag that is none of the settings, and the arguments without it; `what`: what it needs."""
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2], arguments[:index] + arguments[index + 1 :]
        if argument == flag:
            if index + 1 == len(arguments):
                raise UsageError(f"{flag} needs {what}")
            return arguments[index + 1], arguments[:index] + arguments[index + 2 :]
    return None, arguments


def count_taken(arguments: list[str], flag: str, default: int, least: int = 1) -> tuple[int, list[str]]:
    """Take a flag that holds a whole number out of the arguments, as `taken` does, and return the number.

    `default` stands in for a flag that was not typed. Raises UsageError for anything but digits from `least` up to
    a billion.
    """
    text, arguments = taken(arguments, flag, "a number")
    if text is not None and not (text.isascii() and text.isdecimal() and least <= int(text) < 10**9):
        raise UsageError(f"{flag} {text}: it must be a number from {least} on")
    return default if text is None else int(text), arguments


def _field_names(cls: Any) -> list[str]:
    names = []
    for field in dataclasses.fields(cls):
        group = GROUPS.get(field.name) if cls is Config else None
        names += _field_names(group) if group else [field.name]
    return names


def _one_line(told: str) -> str:
    """The message in tyro's report: the first block of text between its title and its hints."""
    blocks: list[list[str]] = [[]]
    for line in _COLOURS.sub("", told).splitlines()[1:]:
        words = line.strip(" │")
        if words and not set(words) <= set("-─╭╮╰╯"):
            blocks[-1].append(words)
        elif blocks[-1]:
            blocks.append([])
    return " ".join(blocks[0]).removeprefix("Error parsing ") or "the arguments cannot be read; see --help"
