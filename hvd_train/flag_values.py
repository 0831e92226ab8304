"""How the text after a flag becomes a value: numbers, choices and `none`, in the help and in errors in words."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args

from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from hvd_train.settings.fields import is_none

_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


def rules() -> ConstructorRegistry:
    """Return the rules by which tyro reads values; what they do not know it reads in its own way."""
    registry = ConstructorRegistry()
    for rule in (_text, _number, _choice, _list, _optional):
        registry.primitive_rule(rule)
    return registry


def _text(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type is not str:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="TEXT",
        instance_from_str=lambda texts: "none" if is_none(texts[0]) else texts[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )


def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type not in _NUMBERS:
        return None
    make: Callable[[str], Any] = info.type

    def read(texts: list[str]) -> Any:
        try:
            return make(texts[0])
        except ValueError:
            raise ValueError(f"it must be {_NUMBERS[info.type]}, not {texts[0]!r}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=info.type.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: type(value) is info.type or (info.type is float and type(value) is int),
        str_from_instance=lambda value: [str(value)],
    )


def _choice(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    origin: Any = info.type_origin
    if origin is not Literal:
        return None
    choices = get_args(info.type)

    def read(texts: list[str]) -> Any:
        found = [choice for choice in choices if choice.lower() == texts[0].lower()]
        if not found:
            raise ValueError(f"it must be one of {', '.join(choices)}, not {texts[0]!r}")
        return found[0]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join(choices),
        instance_from_str=read,
        is_instance=lambda value: value in choices,
        str_from_instance=lambda value: [value],
    )


def _list(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type_origin is not tuple:
        return None
    inner = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(get_args(info.type)[0], info.markers))
    if isinstance(inner, UnsupportedTypeAnnotationError):
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{inner.metavar} ...",
        instance_from_str=lambda texts: (
            () if len(texts) == 1 and is_none(texts[0]) else tuple(inner.instance_from_str([text]) for text in texts)
        ),
        is_instance=lambda values: isinstance(values, tuple) and all(map(inner.is_instance, values)),
        str_from_instance=lambda values: [text for value in values for text in inner.str_from_instance(value)],
    )


def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kinds = [kind for kind in get_args(info.type) if kind is not NoneType]
    if info.type_origin not in (Union, UnionType) or len(kinds) != 1:
        return None
    inner = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))
    if isinstance(inner, UnsupportedTypeAnnotationError):
        return None

    def read(texts: list[str]) -> Any:
        return None if len(texts) == 1 and is_none(texts[0]) else inner.instance_from_str(texts)

    return PrimitiveConstructorSpec(
        nargs=inner.nargs,
        metavar=f"{inner.metavar} or none",
        instance_from_str=read,
        is_instance=lambda value: value is None or inner.is_instance(value),
        str_from_instance=lambda value: ["none"] if value is None else inner.str_from_instance(value),
    )
