"""Write a config as plain values or as the text of a config.yaml, and read it back."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from hvd_train import plain_file
from hvd_train.config import Config
from hvd_train.errors import UsageError

MOST_BYTES = 2**18
"""Largest config.yaml, which YAML takes seconds to read; a run writes a hundredth of it."""

# written texts are quoted
_OF_JSON = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+(e[-+][0-9]+)?)?|true|false|null")


class _Plain(yaml.BaseLoader):
    """Read YAML; `off`, `010`, `20:25`, dates and tags are no values of their own,
    but texts as they are typed.

    Aliases, by which a few bytes stand for gigabytes, and repeated names are refused.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are refused: write out what they stand for")
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        text = super().construct_scalar(node)
        if node.style is not None:  # quoted
            return text
        if text in ("", "~"):
            return None
        return json.loads(text) if _OF_JSON.fullmatch(text) else text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        values = super().construct_mapping(node, deep)
        if len(values) < len(node.value):
            [(name, _)] = Counter(key.value for key, _ in node.value).most_common(1)
            raise yaml.YAMLError(f"{name} is given twice")
        return values


def parse(text: str) -> Any:
    """Return the values in a YAML text. Raises ValueError if it is no YAML or has aliases."""
    try:
        return yaml.load(text, _Plain)  # noqa: S506  # it makes plain values only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None)
        raise ValueError(
            f"line {mark.line + 1}: {problem}" if mark else str(error).splitlines()[0]
        ) from None
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
    return from_dict(values, source=str(path))


def dump(config: Config) -> str:
    """Return the text of a config.yaml that `load` reads back."""
    text: str = yaml.safe_dump(config.as_dict(), sort_keys=False)
    return text


def from_dict(values: object, source: str) -> Config:
    """Make a Config of the values of `as_dict`.

    Raises UsageError, which names `source`, for a wrong name or value.
    """
    if not isinstance(values, dict):
        raise UsageError(f"{source} must hold settings as `name: value`, not {values!r}")
    try:
        return Config().replace(**{str(name): value for name, value in values.items()})
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
