"""Write a config as plain values or as the text of a config.yaml, and read it back."""

import contextlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from hvd_train import plain_file
from hvd_train.config import GROUPS, Config
from hvd_train.errors import UsageError, unknown_name

MOST_BYTES = 2**18
"""Largest config.yaml, which YAML takes seconds to read; a run writes a hundredth of it."""

_RETIRED: dict[str, Any] = {
    "data_changed": False, "repeated_augmentation": 1,
    "reduction": "average", "gradient_predivide_factor": 1, "fusion_groups": None,
}  # fmt: skip
"""Settings of earlier versions, in files of their runs, with the only value that this version stands for."""
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
_WORDS |= {type(None): "null"}
_IGNORED = {"log_dir"}
"""Settings of earlier versions that did not act on the training."""


class _Plain(yaml.SafeLoader):
    """Read YAML without aliases, by which a few bytes stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are refused: write out what they stand for")
        return super().compose_node(parent, index)


def parse(text: str) -> Any:
    """Return the values in a YAML text. Raises ValueError if it is no YAML or has aliases."""
    try:
        return yaml.load(text, _Plain)  # noqa: S506  # made of SafeLoader
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        raise ValueError(f"line {mark.line + 1}: {problem}" if mark else str(error).splitlines()[0]) from None
    except RecursionError:
        raise ValueError("it nests too deep") from None


def load(path: Path) -> Config:
    """Read a config.yaml. Raises UsageError if the file is missing, not YAML or not a config."""
    try:
        values = parse(plain_file.read_text(path, MOST_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not a YAML file: {error}") from None
    return from_dict(_mapping(str(path), values), source=str(path))


def dump(config: Config) -> str:
    """Return the text of a config.yaml that `load` reads back."""
    text: str = yaml.safe_dump(config.as_dict(), sort_keys=False)
    return text


def from_dict(values: Mapping[str, Any], source: str = "the config") -> Config:
    """Make a Config of the values of `as_dict`. Raises UsageError, which names `source`, for a wrong name or value."""
    try:
        groups = {
            name: GROUPS[name](**_typed_fields(GROUPS[name], _mapping(name, value)))
            for name, value in values.items()
            if name in GROUPS
        }
        own = {name: value for name, value in values.items() if name not in GROUPS}
        for group, cls in GROUPS.items():
            if lost := own.keys() & {field.name for field in fields(cls)}:
                raise UsageError(f"write {min(lost)} below `{group}:`")
        return Config(**_typed_fields(Config, own), **groups)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _typed_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to the types of a dataclass's fields: YAML knows neither Path nor tuple."""
    hints = get_type_hints(cls)
    typed = {}
    for name, value in values.items():
        if name in _IGNORED:
            continue
        if name in _RETIRED:
            if value != _RETIRED[name]:
                raise UsageError(f"{name}: {value!r} is of an earlier version: this one has no {name}; delete the line")
            continue
        if name not in hints:
            raise unknown_name("setting", str(name), hints)
        typed[name] = _convert(name, value, hints[name])
    return typed


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type hint of its field. Raises UsageError if that is impossible."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(map(str, get_args(hint)))}")
        return value
    options = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    for option in options:
        if get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(_convert(name, item, get_args(option)[0]) for item in value)
        if option is float and type(value) in (int, str):  # YAML reads 1e-3 as text; 1.0e-3 is a number there
            with contextlib.suppress(ValueError, OverflowError):
                return float(value)
        if option is Path and isinstance(value, str):
            return Path(value)
        if type(value) is option:
            return value
    wanted = " or ".join(_WORDS.get(option, "a list") for option in options)
    raise UsageError(f"{name} is {value!r}; it must be {wanted}")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must hold settings as `name: value`, not {value!r}")
    return value
