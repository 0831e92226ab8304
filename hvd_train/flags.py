"""Read command line flags into a dataclass or one by one. An error is one line with the nearest flag."""

import contextlib
import dataclasses
import io
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

import tyro
from typing_extensions import override

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


def take(arguments: list[str], **flags: Any) -> tuple[Namespace, list[str]]:
    """Take flags with their values out of the arguments of a command; return them, and the other arguments.

    The default of a flag says what it takes: False nothing, a number a whole number from 1 on, and a text or None
    any text. Raises UsageError.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, default in flags.items():
        kinds: dict[type, Any] = {bool: {"action": "store_true"}, int: {"type": _from_one}}
        parser.add_argument(f"--{name.replace('_', '-')}", **kinds.get(type(default), {}), default=default)
    return parser.parse_known_args(arguments)


class _Parser(ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _from_one(text: str) -> int:
    number = whole_number(text)
    if number is None or not 1 <= number < 10**9:
        raise ArgumentTypeError(f"{text}: it must be a whole number from 1 on")
    return number


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
