"""Import the user's own code by its name, `package.module:function`,
also from the current folder.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hvd_train.errors import UsageError, described, place_in_user_code, unknown_name

NAMES_CODE = ("model", "data", "task", "optimizer", "schedule")
"""The settings that may name the user's own code."""
SAMPLES = "hvd_train.tasks.samples"
"""The module of data and networks of our own recipes."""
TIMM = "timm:"
"""Prefix of the names of timm's models."""
HUGGING_FACE = "hf:"
"""Prefix of the folder of a data set of Hugging Face's `datasets`."""
SHARDS = "shards:"
"""Prefix of the URL or folder of a data set in shards."""


def is_reference(name: str) -> bool:
    """Return whether a name means the user's own code, as `mine:model` does."""
    return ":" in name and not name.startswith((TIMM, HUGGING_FACE, SHARDS))


def check_trusted(source: str, names: Mapping[str, str]) -> None:
    """Raise UsageError if a file, which another user may have written, names
    code, a data set or a URL.

    `names` are values by setting. Names of timm's models are harmless: it must know them.
    """
    for setting, name in names.items():
        if ":" in name and not name.startswith((f"{SAMPLES}:", TIMM)):
            raise UsageError(
                f"{source} names {name} as its {setting}, which only `train` opens unasked; "
                "if you trust who wrote it, add --trust"
            )


def load(kind: str, reference: str) -> Callable[..., Any]:
    """Import the function `package.module:function` that the flag `kind` names.

    Raises UsageError if that fails.
    """
    module_name, _, function_name = reference.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        folder, _, name = module_name.removesuffix(".py").rpartition("/")
        found = f"{name}:{function_name}" + (f", with PYTHONPATH={folder}" if folder else "")
        raise UsageError(f"--{kind} {reference}: name a module, not a file: {found}")
    if os.getcwd() not in sys.path:  # unlike python, a console script lacks it
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        reason = f"it calls sys.exit({error})" if isinstance(error, SystemExit) else f"{error}"
        at = place_in_user_code(error)
        raise UsageError(
            f"--{kind} {reference}: cannot import {module_name}: {reason}{at}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        if function is not None:
            raise UsageError(
                f"--{kind} {reference} is {described(function)}: write a function that returns it"
            )
        known = [
            name
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_")
        ]
        raise unknown_name(f"function in {module_name} for --{kind}", function_name, known)
    return function  # type: ignore[no-any-return]  # callable() narrows to Callable[..., object]


def library(name: str, flag: str) -> Any:
    """Import a library that only this flag needs. Raises UsageError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"{flag}: {name} is not installed: pip install {name}") from None


def takes(function: Callable[..., Any], *arguments: object, **named: object) -> bool:
    """Return whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    return True


def call(flag: str, function: Callable[..., Any], parameter: str, value: object) -> Any:
    """Call the user's function with a value for a parameter: by name, else for one
    without default, else without.

    Raises UsageError, which names `flag`, if it takes none of these.
    """
    needed = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty
    ]
    for arguments, named in (((), {parameter: value}), ((value,) if needed else (), {})):
        if takes(function, *arguments, **named):
            return function(*arguments, **named)
    name = getattr(function, "__name__", "the function")
    line = (
        f"def __init__(self, {parameter})"
        if isinstance(function, type)
        else f"def {name}({parameter})"
    )
    raise UsageError(f"{flag}: {name} must accept {parameter}: write `{line}`")
