"""The user's own code by name: `package.module:function`, looked up from the current folder as well."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from hvd_train.errors import UsageError, unknown_name


def is_reference(name: str) -> bool:
    """Whether a name means the user's own code."""
    return ":" in name


def load(kind: str, reference: str) -> Callable[..., Any]:
    """The function that `package.module:function` names.

    Raises UsageError where the module cannot be imported or has no such function; `kind` is the flag's name.
    """
    module_name, _, function_name = reference.partition(":")
    if os.getcwd() not in sys.path:  # a console script does not see the folder it is started from
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise UsageError(f"--{kind} {reference}: cannot import {module_name}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise unknown_name(f"function in {module_name} for --{kind}", function_name, known)
    return function  # type: ignore[no-any-return]  # callable() narrows to Callable[..., object]
