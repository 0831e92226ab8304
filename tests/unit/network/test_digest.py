"""The digest of a state's tensors."""

import torch
from torch import Tensor

from hvd_train.network.buffers import digest_of

BODY, HEAD = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
STATE = {"body": BODY, "head": HEAD}


def digest(tensors: dict[str, Tensor], facts: str = "step 3") -> str:
    return digest_of(facts, tensors.items())


def test_equal_states_have_the_same_digest_on_any_host() -> None:
    assert digest(STATE) == "634b48708cdb7ccc1750c356885d3b4e"
    assert digest({"head": HEAD.clone(), "body": BODY.clone()}) == digest(STATE)
    for shape in ((2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1)):
        plain = torch.arange(24.0 * 5)[: torch.Size(shape).numel()].view(shape)
        for lies in (plain.to(memory_format=torch.channels_last), plain.transpose(0, 1).contiguous().transpose(0, 1)):
            assert digest({"weight": lies}) == digest({"weight": plain})
        assert digest({"weight": plain.flip(0)}) != digest({"weight": plain})
