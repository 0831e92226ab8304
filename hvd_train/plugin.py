"""The user's own code by its name, `package.module:function`, also from modules in the current folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hvd_train.errors import UsageError, unknown_name

TIMM = "timm:"
"""What the names of timm's models begin with."""


class Untrusted(UsageError):
    """A run names code that would be imported, and the user has not said that it may be."""


def is_reference(name: str) -> bool:
    """Return whether a name means the user's own code, as `mine:model` does, and not something built in or timm's."""
    return ":" in name and not name.startswith(TIMM)


def check_trusted(source: str, names: Mapping[str, str]) -> None:
    """Raise Untrusted if a file names code to import; `names` are values by setting.

    Another user may have written the run, and the current folder may hold a module of that name.
    """
    for setting, name in names.items():
        if is_reference(name):
            raise Untrusted(
                f"{source} names code ({setting}: {name}), which only `train` imports unasked; "
                "if you trust who wrote it, add --trust"
            )


def load(kind: str, reference: str) -> Callable[..., Any]:
    """Import the function that a reference, `package.module:function`, names.

    Raises UsageError if the module cannot be imported or has no such function; `kind` is the name of the flag that
    held the reference, without its dashes.
    """
    module_name, _, function_name = reference.partition(":")
    if os.getcwd() not in sys.path:  # a console script does not see the folder it is started from
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        raise UsageError(f"--{kind} {reference}: cannot import {module_name}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise unknown_name(f"function in {module_name} for --{kind}", function_name, known)
    return function  # type: ignore[no-any-return]  # callable() narrows to Callable[..., object]
