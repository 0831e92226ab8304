"""YAML as plain values: what a config.yaml holds, and what a flag's value is read as."""

from __future__ import annotations

from typing import Any

import yaml


class _Plain(yaml.SafeLoader):
    """Reads YAML without aliases, by which a few bytes stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node. Raises YAMLError where it is an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are refused: write out what they stand for")
        return super().compose_node(parent, index)


def parse(text: str) -> Any:
    """Return the values in the text of a YAML file. Raises ValueError where it is none or has aliases."""
    try:
        return yaml.load(text, _Plain)  # noqa: S506  # made of SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise ValueError("it nests too deep") from None
