"""Plain values: what checkpoints and messages hold, and what users' values become in them."""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvd_train.data.trees import form_of, like
from hvd_train.errors import UsageError

# The types that torch.load gives back with weights_only=True. It makes no object of another class,
# such as numpy's.
_LEAVES = {
    bool,
    int,
    float,
    complex,
    str,
    bytearray,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
}
_CONSTANTS = _LEAVES - {bytearray}
_MAPPINGS = {dict, OrderedDict, Counter}
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}
_KIND = "hvd_train.kind"  # of the mapping that stands for a value of another type
_VALUE = "value"
_OF = "of"


def number(value: object, name: str) -> float:
    """Return a number of Python for a number of any library.

    Raises UsageError, which names what is no number.
    """
    with suppress(TypeError, ValueError, RuntimeError):  # it is no number, or not one
        found: Any = value.item() if hasattr(value, "item") else value
        if isinstance(found, int):
            return int(found)
        if not isinstance(found, (str, bytes)):
            return float(found)
    raise UsageError(f"{name} is {form_of(value)}: it must be one number")


def numbers(values: object, name: str) -> dict[str, float]:
    """Return numbers by name, as `number` does each. Raises UsageError."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{name} is {form_of(values)}: it must be a dict of numbers by name")
    return {
        with_plain_numbers(key): number(value, f"{name}[{key!r}]") for key, value in values.items()
    }


def not_constant(values: Mapping[str, Any]) -> list[str]:
    """Return the names of values that are not plain or can change, unlike numbers and texts."""
    return [name for name, value in values.items() if type(value) not in _CONSTANTS]


def with_plain_numbers(value: Any) -> Any:
    """Return a value in which numbers and texts, also in lists and tuples, are
    Python's own; all else stays.
    """
    kind = type(value)
    if kind in _LEAVES or isinstance(value, Enum):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return kind(map(with_plain_numbers, value)) if kind in (list, tuple) else value


def to_plain(value: Any, name: str) -> Any:
    """Return a value in plain types; `from_plain` makes it again.

    It may share tensors with the value.

    Raises UsageError, which names the value or the part of it that has no plain form.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        return value if value.is_leaf else value.detach()
    if kind is list or kind is tuple:
        return kind(to_plain(each, f"{name}[{place}]") for place, each in enumerate(value))
    if kind in _MAPPINGS:
        items = {_key(key, name): to_plain(each, f"{name}[{key!r}]") for key, each in value.items()}
        return like(value, items)
    if kind is set:
        return {_key(each, name) for each in value}
    if (parts := _parts(value)) is not None:
        kind_name, inner, of = parts
        return {_KIND: kind_name, _VALUE: to_plain(inner, name), _OF: of}
    plain = with_plain_numbers(value)
    if type(plain) in _LEAVES:
        return plain
    raise UsageError(
        f"{name}: {form_of(value)} cannot be kept: register what has a state_dict, each under "
        "its own name, or numbers, texts, tensors, arrays of numpy, and containers of these"
    )


def from_plain(value: Any) -> Any:
    """Return the value of which `to_plain` made this one.

    Raises UsageError if its class is not there.
    """
    if isinstance(value, dict):
        if _KIND in value:
            return _MAKE[value[_KIND]](from_plain(value[_VALUE]), value[_OF])
        return like(value, {key: from_plain(each) for key, each in value.items()})
    return type(value)(map(from_plain, value)) if type(value) in (list, tuple) else value


def text_of(value: Any) -> str:
    """Return a text of a plain value without its tensors: the same for equal values, in
    any order of their names.
    """
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(sorted(f"{text_of(key)}: {text_of(each)}" for key, each in value.items()))
            + "}"
        )
    if isinstance(value, set):
        return "{" + ", ".join(sorted(map(text_of, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(text_of, value)) + "]"
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return repr(int(value)) if is_whole else repr(value)  # 1, 1.0 and True are equal


def _key(key: Any, name: str) -> Any:
    """Return a key of a mapping, or a member of a set, in plain types, which are equal to it."""
    plain = with_plain_numbers(int(key) if isinstance(key, int) and isinstance(key, Enum) else key)
    if type(plain) is tuple:
        return tuple(_key(each, name) for each in plain)
    if isinstance(plain, str):
        return str.__str__(plain)
    if type(plain) not in _LEAVES:
        raise UsageError(
            f"{name}: {form_of(key)} cannot be a key or a member that is kept: "
            "use a number or a text"
        )
    return plain


def _parts(value: Any) -> tuple[str, Any, Any] | None:
    """Return for a type that is not plain its name in `_MAKE` and what that function
    needs; None if there is none.
    """
    kind = type(value)
    if kind is np.ndarray or (
        isinstance(value, np.generic) and not isinstance(value, (str, bytes))
    ):
        try:
            tensor = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError):  # of texts, objects or times, or in another order of bytes
            return None
        return ("array" if kind is np.ndarray else "number"), tensor, None
    if kind is defaultdict:
        factory = value.default_factory
        of = factory and getattr(factory, "__name__", "")
        return (
            ("defaultdict", dict(value), of)
            if factory is None or _FACTORIES.get(of) is factory
            else None
        )
    if kind is deque:
        return "deque", list(value), value.maxlen
    if kind is frozenset:
        return "frozenset", set(value), None
    if kind is bytes:
        return "bytes", bytearray(value), None
    if isinstance(value, Enum) and value.name in kind.__members__ and _class(_path(kind)) is kind:
        return "enum", value.name, _path(kind)
    if isinstance(value, tuple) and hasattr(value, "_fields") and _class(_path(kind)) is kind:
        return "namedtuple", list(value), _path(kind)
    return None


def _enum(name: str, path: str) -> Enum:
    found = _class(path)
    if issubclass(found, Enum) and name in found.__members__:
        member: Enum = found.__members__[name]
        return member
    raise _missing(f"{path}.{name}")


def _named_tuple(values: list[Any], path: str) -> Any:
    found = _class(path)
    if issubclass(found, tuple) and len(getattr(found, "_fields", ())) == len(values):
        return tuple.__new__(found, values)  # runs no code of the class
    raise _missing(f"a {path} of {len(values)} fields")


def _missing(what: str) -> UsageError:
    return UsageError(f"a kept value is {what}, which this program does not have")


_MAKE: dict[str, Callable[[Any, Any], Any]] = {
    "array": lambda tensor, _: tensor.cpu().numpy(),
    "number": lambda tensor, _: tensor.cpu().numpy()[()],
    "defaultdict": lambda values, of: defaultdict(of and _FACTORIES[of], values),
    "deque": deque,
    "frozenset": lambda members, _: frozenset(members),
    "bytes": lambda values, _: bytes(values),
    "enum": _enum,
    "namedtuple": _named_tuple,
}


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(path: str) -> type[Any]:
    """Return the class of this name, if it is there already, else `object`: what a
    checkpoint names is not imported.
    """
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else object
