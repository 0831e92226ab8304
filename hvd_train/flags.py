"""The flags of the settings. An error is one line with the nearest flag."""

import ast
import inspect
import sys
from argparse import SUPPRESS, BooleanOptionalAction
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hvd_train.config import GROUPS, Config
from hvd_train.errors import Parser, flag

# Other flags of a setting, most of them of other trainers.
ALIASES = {
    "batch_size": ("-b", "--b"),
    "eval_batch_size": ("--val-batch-size",),
    "learning_rate": ("--lr",),
    "log_steps": ("--print-freq",),
    "max_time": ("--total-time",),
    "model": ("-a", "--arch"),
    "resume": ("--checkpoint",),
    "weight_decay": ("--wd",),
    "workers": ("-j", "--num-workers"),
}

# Flags of launchers and other trainers that would be a misunderstanding here, and what to type.
ELSEWHERE = {
    "--amp": "type --precision fp16 or bf16",
    "--base-lr": "type --learning-rate, and --lr-scaling linear to scale it",
    "--desired-acc": "type --target top1=0.75",
    "--dummy": "type --data synthetic",
    "--elastic": "it is for the launcher: `hvd-train launch --elastic -- train`",
    "--fp16": "type --precision fp16",
    "--fp16-allreduce": "type --compression fp16",
    "--gpus": "each rank takes a GPU: `hvd-train train --np 4` starts four",
    "--log-dir": "type --output-dir for the run folder, which holds tensorboard/",
    "--no-cuda": "type --device cpu",
    "--nodes": "name the hosts: `hvd-train train --hosts h1:4,h2:4`",
    "--opt-level": "apex's O1 and O2 are --precision fp16, its O0 is --precision fp32",
    "--pretrained": "type --weights DEFAULT",
    "--start-epoch": "the same command resumes where it stopped",
    "--workers-per-node": "type --workers for the loader processes of each rank",
    **dict.fromkeys(("--np", "-np", "--hosts", "-H"), "only `hvd-train train` starts ranks"),
    **dict.fromkeys(
        ("--train-dir", "--val-dir"), "type --data-dir for the folder that holds train/ and val/"
    ),
    **dict.fromkeys(("-e", "--evaluate"), "type `hvd-train evaluate RUN`"),
    **dict.fromkeys(
        ("--rank", "--world-size", "--dist-url", "--dist-backend"), "--np 4 starts four ranks"
    ),
}


def settings_parser(program: str, shown: Config) -> Parser:
    """Return a parser with the flags of all settings; the help has the values of `shown`."""
    parser = Parser(prog=program, usage=f"{program} [FLAGS]")
    add_settings(parser, shown)
    return parser


def add_settings(parser: Parser, shown: Config) -> None:
    """Add a flag for each setting, which gives a text if it is typed, and else nothing."""
    _add_fields(parser, Config, shown.settings())
    for name, cls in GROUPS.items():
        _add_fields(parser.add_argument_group(name, cls.__doc__), cls, shown.settings())


def _add_fields(parser: Any, cls: type[Any], shown: Mapping[str, Any]) -> None:
    """Add a flag for each field of a dataclass, with its value in `shown`."""
    hints = get_type_hints(cls)
    for name, about in texts(cls.__module__)[cls.__name__].items():
        hint = hints[name]
        value = shown.get(name)
        value = " ".join(map(str, value)) if isinstance(value, tuple) else value
        default = "" if value is None or value is False or value == "" else f" (default: {value})"
        about = (about + default).replace("%", "%%")
        parser.add_argument(
            flag(name),
            *ALIASES.get(name, ()),
            dest=name,
            default=SUPPRESS,
            help=about,
            **_kind(hint),
        )


def _kind(hint: Any) -> dict[str, Any]:
    """Return how argparse reads a flag of a type, and shows its value in the help."""
    if hint is bool:
        return {"action": BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"metavar": f"{{{','.join(get_args(hint))}}}"}
    if get_origin(hint) is tuple:
        return {"nargs": "*", **_kind(get_args(hint)[0])}
    if get_origin(hint) is UnionType:
        kinds = [
            {"metavar": "none"} if each is NoneType else _kind(each) for each in get_args(hint)
        ]
        return {**kinds[0], "metavar": "|".join(kind["metavar"] for kind in kinds)}
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
