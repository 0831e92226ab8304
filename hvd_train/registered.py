"""State of the user's that survives with the training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from hvd_train.errors import UsageError

_PLAIN = (bool, int, float, str, type(None), torch.Tensor)


class Registered:
    """State of the user's that survives, by name. Plain values are attributes, which may be set."""

    def __init__(self) -> None:
        self._things: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_things"][name]
        except KeyError:
            raise AttributeError(f"nothing is registered as {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_things":
            super().__setattr__(name, value)
        elif name not in self._things or _has_state(self._things[name]):
            raise UsageError(f"{name!r} is not a registered plain value: call session.register({name}=...)")
        else:
            self.add({name: value})

    def add(self, things: Mapping[str, Any]) -> None:
        """Add or replace things by name. Raises UsageError for what cannot be written."""
        for name, value in things.items():
            if not (_has_state(value) or _is_plain(value)):
                raise UsageError(
                    f"register({name}=...): {type(value).__name__} has no state_dict and is no plain value"
                )
        self._things.update(things)

    def copy(self) -> dict[str, Any]:
        """Return a copy of the values by name."""
        return {
            name: copy.deepcopy(thing.state_dict() if _has_state(thing) else thing)
            for name, thing in self._things.items()
        }

    def load(self, values: Mapping[str, Any]) -> None:
        """Set what a copy has."""
        for name, value in values.items():
            if name in self._things and _has_state(self._things[name]):
                self._things[name].load_state_dict(copy.deepcopy(value))
            elif name in self._things:
                self._things[name] = copy.deepcopy(value)


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and _is_plain(each) for key, each in value.items())
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)
