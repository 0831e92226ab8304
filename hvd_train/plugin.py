"""The user's own code by its name, `package.module:function`, also from modules in the current folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_train import user_code
from hvd_train.errors import UsageError, unknown_name

OWN = "custom"
"""Name in the config of a model, data set or task that was given as a Python object without a name of its own."""
TIMM = "timm:"
"""What the names of timm's models begin with."""
HUGGING_FACE = "hf:"
"""What stands before the path of a data set that Hugging Face's `datasets` has saved."""


class Untrusted(UsageError):
    """A run names code that would be imported, and the user has not said that it may be."""


def is_reference(name: str) -> bool:
    """Return whether a name means the user's own code, as `mine:model` does, and not something built in or a path."""
    return ":" in name and not name.startswith((TIMM, HUGGING_FACE))


def check_spelling(kind: str, name: str) -> None:
    """Raise UsageError for the path of a Python file, and for `mine.model` where there is a mine.py: it says how.

    `kind` is the name of the flag without its dashes, and of the function where none was named.
    """
    path, colon, function = name.partition(":")
    module, _, last = name.rpartition(".")
    if path.endswith(".py"):
        module, last = path.removesuffix(".py").removeprefix("./").strip("/").replace("/", "."), function
    elif not colon and _is_file(name):
        module, last = name, ""
    elif colon or not _is_file(module):
        return
    raise UsageError(f"--{kind} {name}: write MODULE:FUNCTION, as in --{kind} {module}:{last or kind}")


def _is_file(module: str) -> bool:
    return Path(f"{module.replace('.', '/')}.py").is_file()


def check_trusted(source: str, names: Mapping[str, str]) -> None:
    """Raise Untrusted where one of the names that a file holds means code; they stand under the names of settings.

    Whoever reads a run does not run what it names: anybody may have written it, and the current folder may hold it.
    """
    for setting, name in names.items():
        if is_reference(name):
            raise Untrusted(
                f"{source} names code ({setting}: {name}), which only `train` imports unasked; "
                "if you trust who wrote it, add --trust"
            )


def load(kind: str, reference: str, *values: type[Any]) -> Any:
    """Import the function that a reference, `package.module:function`, names, or a value of one of these types.

    Raises UsageError where the module cannot be imported or has no such function; `kind` is the name of the flag that
    held the reference, without its dashes.
    """
    module_name, _, function_name = reference.partition(":")
    if os.getcwd() not in sys.path:  # a console script does not see the folder it is started from
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise UsageError(f"--{kind} {reference}: cannot import {module_name}: {error}") from error
    function = getattr(module, function_name, None)
    if not (callable(function) or isinstance(function, values)):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise unknown_name(f"function in {module_name} for --{kind}", function_name, known)
    return function


def first_line(error: Exception) -> str:
    """Return in one line what the user's code has raised: of what type, in which words, and where in that code."""
    words = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
    place = user_code.place(error)
    return f"{words} ({place})" if place else words
