"""Values of users in the types that checkpoints and messages can have."""

import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hvd_train.data.plain import from_plain, number, numbers, text_of, to_plain, with_plain_numbers
from hvd_train.data.trees import map_tensors
from hvd_train.errors import UsageError


class Phase(IntEnum):
    WARM = 1


class Kind(Enum):
    TEACHER = "teacher"


class Pair(NamedTuple):
    mean: float
    history: Any


class Word(str):
    pass


class Row(dict[str, int]):
    pass


class Odd(torch.Tensor):
    pass


KEPT = [
    None,
    2**70,
    1 + 2j,
    -0.0,
    b"\xff\0",
    bytearray(b"a"),
    np.float64(2.5),
    np.int64(3),
    np.bool_(True),
    np.arange(6).reshape(2, 3).T,
    np.ones((), bool),
    np.zeros((0, 2), "uint32"),
    torch.ones(2, dtype=torch.bfloat16),
    torch.tensor(3),
    torch.Size([2, 3]),
    torch.float16,
    torch.device("cpu"),
    Counter({2: 1, 5: 2}),
    OrderedDict(b=1, a=[2]),
    defaultdict(list, {1: [np.int64(2)]}),
    defaultdict(None, a=1),
    deque([1, np.float32(2)], maxlen=5),
    deque(),
    {1, 2},
    frozenset({"a"}),
    (1, [2, {"a": ()}]),
    Phase.WARM,
    Kind.TEACHER,
    Pair(0.5, [np.ones(2), Pair(1, ())]),
    {(1, "a"): Phase.WARM},
    random.getstate(),
    np.random.get_state(),
    np.random.default_rng(0).bit_generator.state,
    torch.nn.BatchNorm1d(2).state_dict(),
]


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("value", KEPT, ids=lambda value: type(value).__name__)
def test_values_come_back_from_a_checkpoint_as_they_were(value: Any) -> None:
    """With their types, also inside containers, and after all ways of tensors."""
    plain = to_plain(value, "value")
    back = from_plain(map_tensors(through_a_file(plain), torch.clone))
    assert type(back) is type(value)
    arrays = (map_tensors(each, lambda tensor: tensor.float().numpy()) for each in (back, value))
    np.testing.assert_equal(*arrays)
    for name in ("dtype", "maxlen", "default_factory", "_metadata"):
        assert getattr(back, name, None) == getattr(value, name, None)
    assert text_of(to_plain(back, "value")) == text_of(plain)


@pytest.mark.parametrize(
    "value",
    [
        Path(),
        np.array(["a"]),
        np.longdouble(1),
        np.ma.masked_array([1.0], [True]),
        Row(a=1),
        defaultdict(Row),
        torch.eye(2).to_sparse(),
        torch.ones(2).as_subclass(Odd),
        {torch.ones(1)},
    ],
)
def test_a_value_that_cannot_be_kept_is_named(value: Any) -> None:
    """By its place in containers, too."""
    with pytest.raises(UsageError, match=r"^x: .* (cannot be kept|that is kept)"):
        to_plain(value, "x")
    with pytest.raises(UsageError, match=r"^x\['a'\]\[1\]\[0\]: "):
        to_plain({"a": [1, Pair(value, 1)]}, "x")


def test_texts_of_equal_values_are_equal() -> None:
    """In any order of names, and for any type of number; other values have other texts."""
    one = {"a": 1, "b": [np.float64(2)], "c": {3, "d"}}
    assert text_of(to_plain(one, "")) == text_of(
        to_plain({"c": {"d", 3}, "b": [np.float64(2)], "a": 1.0}, "")
    )
    texts = [
        text_of(value)
        for value in (1, 2, 1.5, "1", None, [1], [1, 1], {1: 1}, float("nan"), 2**60, 2**60 + 1)
    ]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("kept", ["x:Pair", f"{__name__}:KEPT", "os:system", f"{__name__}:Phase"])
def test_a_checkpoint_chooses_no_code(kept: str) -> None:
    with pytest.raises(UsageError, match="which this program does not have"):
        from_plain({"hvd_train.kind": "namedtuple", "value": [1, 2], "of": kept})


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.5),
        np.longdouble(0.5),
        np.int8(2),
        np.bool_(True),
        True,
        Phase.WARM,
        torch.tensor([3]),
        torch.ones((), requires_grad=True),
        np.array([[0.5]]),
        0.5,
    ],
)
def test_a_figure_is_a_number_of_python(value: Any) -> None:
    found = number(value, "x")
    assert found == value
    assert type(found) in (int, float)


@pytest.mark.parametrize("value", [None, "1.5", torch.ones(2), np.zeros(0), [1.0]])
def test_a_figure_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^x\['ap'\] is .*: it must be one number"):
        numbers({"ap": value}, "x")
    with pytest.raises(UsageError, match=r"^x is .*: it must be a dict of numbers by name"):
        numbers(value, "x")


def test_settings_have_numbers_of_python() -> None:
    """Tensors, such as learning rates, stay."""
    rate = torch.tensor(0.5)
    assert with_plain_numbers(rate) is rate
    found = with_plain_numbers([np.float32(0.5), (np.int64(2), Word("a")), None])
    assert found == [0.5, (2, "a"), None]
    assert [type(found[0]), *map(type, found[1])] == [float, int, str]
