"""Read command line flags into a dataclass or one by one. An error is one line with the nearest flag."""

import contextlib
import io
import re
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, TypeVar, cast, get_args, get_type_hints

import tyro

from hvd_train.config import GROUPS, Config
from hvd_train.errors import Parser, UsageError, from_one, unknown_name

T = TypeVar("T")
_WORDS = {
    r"invalid literal for int\(\) with base 10: ('.*')": r"\1 is no whole number",
    r"could not convert string to float: ('.*')": r"\1 is no number",
    r"no type matching \{None\}\|INT could be instantiated from \[(.*)\]\.": r"\1 is no whole number",
    r"no type matching \{None\}\|FLOAT could be instantiated from \[(.*)\]\.": r"\1 is no number",
    r"(?:no type matching .* from|Could not find valid parse for arguments:) \[.*\]\.?": "write numbers, as in 30 60",
    r"\[\{None\}\|PATH\]: .*": "leave out the flag before the folder",
    r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)\.": r"\2 \1: it must be one of \3",
    r"Missing value for argument '(.*)'\. Expected 1 values\.": r"\1: expected one argument",
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Open MPI gives ranks a terminal


def parse_flags(
    cls: type[T], arguments: Sequence[str], program: str, default: T | None = None, about: str | None = None
) -> T:
    """Make a dataclass of command line flags, one for each field; the help names `program`, and opens with `about`.

    Other fields keep the values of `default` or the class. Raises UsageError in one line; SystemExit after `--help`.
    """
    options: dict[str, Any] = {"prog": program, "config": (tyro.conf.OmitArgPrefixes,), "description": about}
    if default is not None:
        options["default"] = default
    report, shown = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(report), contextlib.redirect_stdout(shown):
            parsed: tuple[T, list[str]] = tyro.cli(
                cls, args=_without_none(cls, arguments), return_unknown_args=True, **options
            )
    except SystemExit as ended:
        if not ended.code:  # --help
            optional = r"\{None\}\|(\w+)"
            print(re.sub(optional, lambda it: f"{it[1]}|none".ljust(len(it[0])), shown.getvalue()), end="")
            raise
        raise UsageError(_one_line(report.getvalue())) from None
    value, unknown = parsed
    if (moved := _positional_first(arguments, unknown)) != [*arguments]:
        return parse_flags(cls, moved, program, default, about)
    if unknown and not unknown[0].startswith("-"):
        raise UsageError(f"unexpected {unknown[0]!r}: leave it out (a switch, such as --compile, takes no value)")
    if unknown:
        names = [*Config().settings(), "config"] if cls is Config else cast(Any, cls).__dataclass_fields__
        known = [f"--{name.replace('_', '-')}" for name in names]
        raise unknown_name("argument", unknown[0].partition("=")[0], [*known, "--help"])
    return value


def _positional_first(arguments: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """Move words without a flag, which tyro does not take after flags, in front of the first flag."""
    first = next((place for place, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    flags = [*reversed(arguments[first:])]
    if any(word.startswith("-") or word not in flags for word in unknown):
        return [*arguments]
    for word in reversed(unknown):
        flags.remove(word)  # the last one: an earlier one may be a value
    return [*arguments[:first], *unknown, *reversed(flags)]


def _without_none(cls: type[Any], arguments: Sequence[str]) -> list[str]:
    """Write `none` in any case as tyro reads it: as None for a flag that may have no value."""
    groups = [cls, *(GROUPS.values() if cls is Config else ())]
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    optional = {name for name, hint in hints.items() if type(None) in get_args(hint)}
    found = list[str]()
    for argument in arguments:
        before, equals, value = argument.rpartition("=")
        name = (before or (found[-1] if found else "")).removeprefix("--").replace("-", "_")
        is_none = value.lower() == "none"
        found.append(before + equals + ("None" if name in optional else "none") if is_none else argument)
    return found


def take(arguments: list[str], **flags: Any) -> tuple[Namespace, list[str]]:
    """Take flags with their values out of the arguments of a command; return them, and the other arguments.

    The default of a flag says what it takes: False nothing, a number a whole number from 1 on, and a text or None
    any text. Raises UsageError.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    for name, default in flags.items():
        kinds: dict[type, Any] = {bool: {"action": "store_true"}, int: {"type": from_one}}
        parser.add_argument(f"--{name.replace('_', '-')}", **kinds.get(type(default), {}), default=default)
    return parser.parse_known_args(arguments)


def _one_line(report: str) -> str:
    """Return the message of tyro's report: the text between its title and its hints."""
    blocks: list[list[str]] = [[]]
    for line in _COLOURS.sub("", report).splitlines()[1:]:
        words = line.strip(" │")
        if words and not set(words) <= set("-─╭╮╰╯"):
            blocks[-1].append(words)
        elif blocks[-1]:
            blocks.append([])
    line = " ".join(blocks[0]).removeprefix("Error parsing ")
    for pattern, words in _WORDS.items():
        line = re.sub(pattern, words, line)
    line = line.replace("'", "") if "it must be one of" in line else line
    return line or "the arguments cannot be read; see --help"
