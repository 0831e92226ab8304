"""A config as plain values and as the text of a config.yaml, written and read back."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from hvd_train import plain_file
from hvd_train.config import GROUPS, Config
from hvd_train.errors import UsageError, unknown_name
from hvd_train.plain_yaml import parse
from hvd_train.settings.fields import is_none

MOST_BYTES = 2**18
"""What a config.yaml may hold: a hundred times what a run writes. YAML takes seconds to read as much."""


_IN_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "none",
}


def load(path: Path) -> Config:
    """Read a config.yaml. Raises UsageError where the file is missing, not YAML or not a config."""
    try:
        values = parse(plain_file.read_text(path, MOST_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"{path} is not a YAML file: {first}") from None
    return from_dict(_mapping(str(path), values), source=str(path))


def dump(config: Config) -> str:
    """Return the text of a config.yaml that `load` reads back."""
    text: str = yaml.safe_dump(config.as_dict(), sort_keys=False)
    return text


def from_dict(values: Mapping[str, Any], source: str = "the config") -> Config:
    """Make a Config of the values that `Config.as_dict` returned.

    Raises UsageError where a name is unknown or a value is none of its field's type; `source`, a path as a rule,
    begins the message.
    """
    try:
        groups = {
            name: GROUPS[name](**_typed_fields(GROUPS[name], _mapping(name, value)))
            for name, value in values.items()
            if name in GROUPS
        }
        own = {name: value for name, value in values.items() if name not in GROUPS}
        return Config(**_typed_fields(Config, own), **groups)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def typed(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return settings of any groups, by name, as `Config.replace` takes them: paths may be text, tuples may be lists.

    Raises UsageError, which begins with `source`, for a name that is no setting, and for a value of another type.
    """
    hints = {name: hint for name, hint in get_type_hints(Config).items() if name not in GROUPS}
    for cls in GROUPS.values():
        hints |= get_type_hints(cls)
    try:
        for name in settings:
            if name not in hints:
                raise unknown_name("setting", name, hints)
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        return {name: _convert(name, value, hints[name]) for name, value in plain.items()}
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _typed_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to the types of a dataclass's fields: YAML knows neither Path nor tuple.

    Raises UsageError for a name that is no field, and for a value of another type.
    """
    hints = get_type_hints(cls)
    typed = {}
    for name, value in values.items():
        if name not in hints:
            raise unknown_name("setting", str(name), hints)
        typed[name] = _convert(name, value, hints[name])
    return typed


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Return a value as the type hint of its field wants it. Raises UsageError where it cannot be that."""
    if is_none(value):
        value = None if type(None) in get_args(hint) else "none"
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(map(str, get_args(hint)))}")
        return value
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(name, item, get_args(hint)[0]) for item in value)
    options = get_args(hint) or (hint,)
    if get_origin(options[0]) is tuple and value is not None:  # tuple[...] | None
        return _convert(name, value, options[0])
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is float and type(value) is int:
            return float(value)
        if option is float and isinstance(value, str):  # YAML reads 1e-3 as text; 1.0e-3 is a number there
            with contextlib.suppress(ValueError):
                return float(value)
        if option is Path and isinstance(value, str):
            return Path(value)
        if option is str and type(value) in (int, float):  # as in `max_time: 90`
            return str(value)
        if isinstance(option, type) and type(value) is option:
            return value
    wanted = " or ".join(_IN_WORDS.get(option, str(option)) for option in options)
    raise UsageError(f"{name} is {value!r}; it must be {wanted}")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must hold settings as `name: value`, not {value!r}")
    return value
