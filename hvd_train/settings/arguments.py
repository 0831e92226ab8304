"""Arguments for the user's own code, `name=value`, with values as YAML writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from hvd_train.errors import UsageError
from hvd_train.plain_yaml import parse
from hvd_train.settings.fields import is_none


def arguments_in(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that a flag holds by their names: `eps=1e-6`, `amsgrad=true`, `betas=[0.9, 0.95]`.

    A list becomes a tuple. Raises UsageError for a text without a name, and for a value that is neither a number, a
    text, true, false, null or none, nor a list of such.
    """
    arguments = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise UsageError(f"--{flag} {text}: it must be name=value, as in --{flag} eps=1e-6 betas=[0.9,0.95]")
        try:
            read = parse(value)
        except ValueError as error:
            raise UsageError(f"--{flag} {text}: the value cannot be read: {error}") from None
        arguments[name] = tuple(map(_scalar, read)) if isinstance(read, list) else _scalar(read)
        for item in arguments[name] if isinstance(read, list) else (arguments[name],):
            if not isinstance(item, (str, int, float, type(None))):  # bool is an int
                raise UsageError(f"--{flag} {text}: the value must be a number, a text, true, false, null or a list")
    return arguments


def _scalar(value: Any) -> Any:
    """Return None for none, and 1e-6 as a number: YAML reads both as text, and 1.0e-6 as a number."""
    if is_none(value):
        return None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value
