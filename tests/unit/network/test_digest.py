"""The digest of a state's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hvd_train.network.digest import digest_of, tensors_in

BODY, HEAD = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
STATE = {"body": BODY, "head": HEAD}


def digest(tensors: dict[str, Tensor], facts: str = "step 3") -> str:
    """The digest of a flat state."""
    return digest_of(facts, tensors.items())


def test_equal_states_have_the_same_digest_on_any_host() -> None:
    """In any process, on any machine, whatever order the tensors come in."""
    assert digest(STATE) == "634b48708cdb7ccc1750c356885d3b4e"
    assert digest({"head": HEAD.clone(), "body": BODY.clone()}) == digest(STATE)


@pytest.mark.parametrize(
    "other",
    [
        {"body": HEAD, "head": BODY},
        {"body": BODY, "tail": HEAD},
        {"body": BODY},
        {"body": BODY.view(3, 2), "head": HEAD},
        {"body": BODY.view(torch.int32), "head": HEAD},
        {"body": BODY.double(), "head": HEAD},
        {"body": BODY, "head": -HEAD},
        {"body": BODY, "head": HEAD, "more": torch.empty(0)},
    ],
    ids=["swapped", "renamed", "missing", "another shape", "another type", "more digits", "other numbers", "more"],
)
def test_states_that_differ_have_other_digests(other: dict[str, Tensor]) -> None:
    """Tensors that were swapped count as different, and so do the same bytes with another shape, type or name."""
    assert digest(other) != digest(STATE)
    assert digest(STATE, "step 4") != digest(STATE)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1)])
def test_how_numbers_lie_in_memory_does_not_matter(shape: tuple[int, ...]) -> None:
    """A rank that has loaded a tensor may keep it in another order of memory than one that has made it."""
    plain = torch.arange(24.0 * 5)[: torch.Size(shape).numel()].view(shape)
    for lies in (plain.to(memory_format=torch.channels_last), plain.transpose(0, 1).contiguous().transpose(0, 1)):
        assert digest({"weight": lies}) == digest({"weight": plain})
    assert digest({"weight": plain.flip(0)}) != digest({"weight": plain})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_any_type_count(dtype: torch.dtype) -> None:
    """Also scalars, such as the step count of an optimizer, in whatever type."""
    zero, one = torch.tensor(0).to(dtype), torch.tensor(1).to(dtype)
    assert digest({"step": zero}) == digest({"step": zero.clone()})
    assert digest({"step": zero}) != digest({"step": one})


def test_nested_states_name_their_tensors() -> None:
    """By the keys and places that lead to them; what is no tensor is left out."""
    nested = {"model": {"body": BODY}, "average": None, "optimizer": {0: {"step": 3, "moments": [BODY, HEAD]}}}
    assert [(name, tensor.data_ptr()) for name, tensor in tensors_in(nested)] == [
        ("/model/body", BODY.data_ptr()),
        ("/optimizer/0/moments/0", BODY.data_ptr()),
        ("/optimizer/0/moments/1", HEAD.data_ptr()),
    ]
