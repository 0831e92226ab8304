"""Trees of tensors: what is taken apart comes together again."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from hvd_train.data.trees import Packed, filled, is_tree, leaves, mapped, of_tensors, packed, structure, unpacked


class Named(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Kept:
    first: Any
    second: Any


def t(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


TREES: dict[str, Any] = {
    "tensor": t(1, 2),
    "(tensor, tensor)": (t(1), t(2, 3)),
    "(tensor)": (t(1),),
    "[tensor, [tensor]]": [t(1), [t(2)]],
    "{b: tensor, a: (tensor, tensor)}": {"b": t(1), "a": (t(2), t(3))},
    "Named(first=tensor, second={})": Named(t(1), {}),
    "Kept(first=Named(first=tensor, second=tensor), second=[tensor])": Kept(Named(t(1), t(2)), [t(3)]),
    "()": (),
}


@pytest.mark.parametrize("words", TREES)
def test_round_trips(words: str) -> None:
    """A tree sent to another process, and one filled with its own leaves, is the same tree of the same types."""
    tree = TREES[words]
    assert structure(tree) == words
    found = leaves(tree)
    assert [leaf[0].item() for leaf in found] == [*range(1, len(found) + 1)]
    for same in (
        filled(tree, iter(found)),
        mapped(lambda leaf: leaf, tree),
        unpacked(packed(tree)),
        of_tensors(tree),
        unpacked(pickle.loads(pickle.dumps(packed(tree)))),
    ):
        assert (type(same), structure(same)) == (type(tree), words)
        assert _equal(leaves(same), found)
    doubled = mapped(lambda leaf: 2 * leaf, tree)
    assert structure(doubled) == words
    assert _equal(leaves(doubled), [2 * leaf for leaf in found])
    assert is_tree(tree)


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_what_travels_holds_its_tensors_side_by_side() -> None:
    """A tensor goes as it is; of a tree the structure holds None in their places, and their bytes add up."""
    one = t(1.0, 2.0)
    assert packed(one) is one
    sent = packed(Kept(one, {"x": t(3).double()}))
    assert isinstance(sent, Packed)
    assert sent.template == Kept(None, {"x": None})
    assert sent.nbytes == 8 + 8


def test_trees_of_another_structure_have_other_words() -> None:
    """Tuples, lists, names and their order are told apart; sizes are not part of it."""
    assert len({structure(tree) for tree in TREES.values()}) == len(TREES)
    assert structure({"a": t(1), "b": t(2)}) != structure({"b": t(1), "a": t(2)})
    assert structure((t(1), t(2, 3))) == structure((t(1, 2), t(3)))


def test_numbers_and_arrays_become_tensors() -> None:
    """In their own format; what is neither is named by its type."""
    tree = of_tensors({"a": 1, "b": [2.5, True], "c": np.float32(3), "d": np.arange(2)})
    assert structure(tree) == "{a: tensor, b: [tensor, tensor], c: tensor, d: tensor}"
    kinds = [torch.int64, torch.float32, torch.bool, torch.float32, torch.int64]
    assert [leaf.dtype for leaf in leaves(tree)] == kinds
    for value, name in (("text", "str"), ([t(1), None], "NoneType"), ({"a": {1}}, "set"), (Kept, "type")):
        with pytest.raises(TypeError, match=f"^{name}$"):
            of_tensors(value)
        assert not is_tree(value)
    assert not is_tree((t(1), 2))
