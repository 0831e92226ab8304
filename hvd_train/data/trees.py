"""Trees of tensors: batches of any items, and snapshots."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor


def map_tensors(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tree with `function` applied to each tensor; other leaves, such as texts, stay.

    A tree has tuples, lists, mappings and dataclasses. An object with a method `to`, such as a
    batch of Hugging Face's tokenizers, counts as a tensor.
    """
    if isinstance(tree, Tensor) or hasattr(tree, "to"):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a NamedTuple
        return type(tree)(*(map_tensors(value, function) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_tensors(value, function) for value in tree])
    if isinstance(tree, dict):
        return like(tree, {name: map_tensors(value, function) for name, value in tree.items()})
    if isinstance(tree, Mapping):
        return {name: map_tensors(value, function) for name, value in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        return dataclasses.replace(
            tree, **{name: map_tensors(value, function) for name, value in values.items()}
        )
    return tree


def parts_of(tree: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of a mapping, list or tuple; None for a leaf."""
    if isinstance(tree, Mapping):
        return [*tree.items()]
    return [*enumerate(tree)] if isinstance(tree, (list, tuple)) else None


def tensors_in(values: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and value of each tensor in nested containers."""
    if isinstance(values, Tensor):
        yield name, values
    for key, value in parts_of(values) or ():
        yield from tensors_in(value, f"{name}/{key}")


def like(mapping: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """Return `values` in a mapping of the same type, factory and attributes."""
    if type(mapping) is dict:
        return values
    made = copy.copy(mapping)
    made.clear()
    for name, value in values.items():
        made[name] = value
    return made


def form_of(value: object) -> str:
    """Return what a value is, for a message: its type and shape, or a number itself."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(form_of, value[:4]))})"
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{type(value).__name__} of shape {list(value.shape)}, {value.dtype}"
    return str(value) if isinstance(value, (int, float)) else type(value).__name__
