"""The flags of the settings. An error is one line with the nearest flag."""

import ast
import inspect
import sys
from argparse import SUPPRESS, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hvd_train.config import GROUPS, Config
from hvd_train.errors import Parser, from_one

# Other flags of a setting, most of them of other trainers.
ALIASES = {
    "batch_size": ("-b", "--b"),
    "eval_batch_size": ("--val-batch-size",),
    "learning_rate": ("--lr",),
    "log_steps": ("--print-freq",),
    "max_time": ("--total-time",),
    "model": ("-a", "--arch"),
    "resume": ("--checkpoint",),
    "target_accuracy": ("--desired-acc",),
    "weight_decay": ("--wd",),
    "workers": ("-j", "--num-workers"),
}


def settings_parser(program: str, shown: Config, about: str | None = None) -> Parser:
    """Return a parser with a flag for each setting, which gives a text; the help has the values of `shown`.

    Its result has the flags that are given, and no others.
    """
    parser = Parser(
        prog=program, usage=f"{program} [FLAGS]", description=about, formatter_class=RawDescriptionHelpFormatter,
        argument_default=SUPPRESS,
    )  # fmt: skip
    _add_fields(parser, Config, shown.settings())
    for name, cls in GROUPS.items():
        _add_fields(parser.add_argument_group(name, cls.__doc__), cls, shown.settings())
    return parser


def _add_fields(parser: Any, cls: type[Any], shown: Mapping[str, Any]) -> None:
    """Add a flag for each field of a dataclass, with its value in `shown`."""
    hints = get_type_hints(cls)
    for name, about in texts(cls.__module__)[cls.__name__].items():
        hint = hints[name]
        value = shown.get(name)
        flag = f"--{name.replace('_', '-')}"
        value = " ".join(map(str, value)) if isinstance(value, tuple) else value
        default = "" if value is None or value is False or value == "" else f" (default: {value})"
        about = (about + default).replace("%", "%%")
        parser.add_argument(flag, *ALIASES.get(name, ()), dest=name, help=about, **_kind(hint))


def _kind(hint: Any) -> dict[str, Any]:
    """Return how argparse reads a flag of a type, and shows its value in the help."""
    if hint is bool:
        return {"action": BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"metavar": f"{{{','.join(get_args(hint))}}}"}
    if get_origin(hint) is tuple:
        return {"nargs": "*", **_kind(get_args(hint)[0])}
    if get_origin(hint) is UnionType:
        kind = _kind(get_args(hint)[0])
        return {**kind, "metavar": f"{kind['metavar']}|none"}
    return {"metavar": hint.__name__.upper()}


@cache
def texts(module: str) -> dict[str, dict[str, str]]:
    """Return the text below each field of the dataclasses in a module."""
    found: dict[str, dict[str, str]] = {}
    nodes = ast.parse(inspect.getsource(sys.modules[module])).body
    for cls in (node for node in nodes if isinstance(node, ast.ClassDef)):
        for field, text in pairwise(cls.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                about = " ".join(ast.literal_eval(text.value).split())
                found.setdefault(cls.name, {})[ast.unparse(field.target)] = about
    return found


def take(arguments: list[str], **flags: Any) -> tuple[Namespace, list[str]]:
    """Take flags with their values out of the arguments of a command; return them, and the other arguments.

    The default of a flag says what it takes: False nothing, a number a whole number from 1 on, and a text or None
    any text. Raises UsageError.
    """
    parser = Parser(add_help=False)
    for name, default in flags.items():
        kinds: dict[type, Any] = {bool: {"action": "store_true"}, int: {"type": from_one}}
        parser.add_argument(f"--{name.replace('_', '-')}", **kinds.get(type(default), {}), default=default)
    return parser.parse_known_args(arguments)
