"""Write a config as plain values or as the text of a config.yaml, and read it back."""

from pathlib import Path
from typing import Any

import yaml

from hvd_train import plain_file
from hvd_train.config import Config
from hvd_train.errors import UsageError

MOST_BYTES = 2**18
"""Largest config.yaml, which YAML takes seconds to read; a run writes a hundredth of it."""


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
    return from_dict(values, source=str(path))


def dump(config: Config) -> str:
    """Return the text of a config.yaml that `load` reads back."""
    text: str = yaml.safe_dump(config.as_dict(), sort_keys=False)
    return text


def from_dict(values: object, source: str) -> Config:
    """Make a Config of the values of `as_dict`. Raises UsageError, which names `source`, for a wrong name or value."""
    if not isinstance(values, dict):
        raise UsageError(f"{source} must hold settings as `name: value`, not {values!r}")
    try:
        return Config().replace(**{str(name): value for name, value in values.items()})
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
