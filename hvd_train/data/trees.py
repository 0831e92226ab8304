"""Trees of tensors: a tensor alone, or tuples, lists, dicts and dataclasses of trees, as data sets return them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tree = Any
"""A tensor, or a tuple, named tuple, list, dict or dataclass of trees."""


def leaves(tree: Tree) -> list[Tensor]:
    """Return the leaves of a tree in their order, from left to right."""
    return [tree] if isinstance(tree, Tensor) else [leaf for part in _parts(tree) for leaf in leaves(part)]


def mapped(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return a tree of the same structure whose leaves are what `function` makes of those of `tree`."""
    return (
        function(tree) if isinstance(tree, Tensor) else _like(tree, [mapped(function, part) for part in _parts(tree)])
    )


def filled(tree: Tree, values: Iterator[Tensor]) -> Tree:
    """Return a tree of the structure of `tree` whose leaves, tensors or None, are the next ones of `values`."""
    if tree is None or isinstance(tree, Tensor):
        return next(values)
    return _like(tree, [filled(part, values) for part in _parts(tree)])


def of_tensors(value: Any) -> Tree:
    """Return a tree of tensors: numbers and arrays become such. Raises TypeError, with its type, for anything else."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float, np.ndarray, np.generic)):
        return torch.as_tensor(value)
    if not _is_branch(value):
        raise TypeError(type(value).__name__)
    return _like(value, [of_tensors(part) for part in _parts(value)])


@dataclass(frozen=True)
class Packed:
    """A tree on its way between processes: its leaves, and its structure with None in their places.

    DataLoader finds no tensors in dataclasses.
    """

    leaves: list[Tensor]
    template: Tree

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def pin_memory(self, device: str = "") -> Packed:
        """Return the same tree in memory that a GPU can read by itself; DataLoader calls it."""
        return replace(self, leaves=[leaf.pin_memory() for leaf in self.leaves])


def packed(tree: Tree) -> Tensor | Packed:
    """Return a tree ready to be sent; a tensor is so as it is."""
    return tree if isinstance(tree, Tensor) else Packed(leaves(tree), _template(tree))


def unpacked(value: Tensor | Packed) -> Tree:
    """Return the tree that has been packed."""
    return filled(value.template, iter(value.leaves)) if isinstance(value, Packed) else value


def _template(tree: Tree) -> Tree:
    return None if isinstance(tree, Tensor) else _like(tree, [_template(part) for part in _parts(tree)])


def structure(tree: Tree) -> str:
    """Return how a tree is built, in words for the user: only trees of one structure have the same."""
    if isinstance(tree, Tensor):
        return "tensor"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{name}: {structure(part)}" for name, part in tree.items()) + "}"
    if dataclasses.is_dataclass(tree) or hasattr(tree, "_fields"):
        named = (f"{name}={structure(part)}" for name, part in zip(_names(tree), _parts(tree), strict=True))
        return f"{type(tree).__name__}({', '.join(named)})"
    if isinstance(tree, (tuple, list)):
        inside = ", ".join(map(structure, tree))
        return f"({inside})" if isinstance(tree, tuple) else f"[{inside}]"
    return type(tree).__name__


def is_tree(value: Any) -> bool:
    """Return whether a value is a tree of tensors and nothing else."""
    if isinstance(value, Tensor):
        return True
    return _is_branch(value) and all(is_tree(part) for part in _parts(value))


def _is_branch(value: Any) -> bool:
    return isinstance(value, (tuple, list, dict)) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _names(tree: Any) -> list[str]:
    return list(tree._fields) if hasattr(tree, "_fields") else [field.name for field in dataclasses.fields(tree)]


def _parts(tree: Tree) -> list[Any]:
    if isinstance(tree, dict):
        return list(tree.values())
    if isinstance(tree, (tuple, list)):
        return list(tree)
    return [getattr(tree, name) for name in _names(tree)]


def _like(tree: Tree, parts: list[Any]) -> Tree:
    if isinstance(tree, dict):
        return dict(zip(tree, parts, strict=True))
    if hasattr(tree, "_fields"):
        return type(tree)(*parts)
    if isinstance(tree, (tuple, list)):
        return type(tree)(parts)
    return dataclasses.replace(tree, **dict(zip(_names(tree), parts, strict=True)))
