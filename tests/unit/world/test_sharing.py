"""Whether ranks come to share weights: all of them or none, and the user learns why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from hvd_train.world import sharing
from hvd_train.world.host_memory import Address, HostMemory
from hvd_train.world.shared_weights import SharedWeights
from hvd_train.world.sharing import share
from hvd_train.world.step_in_c import Rounding
from hvd_train.world.world import World
from tests.support.worlds import run_ranks


def sgd(groups: Any) -> Optimizer:
    """Return an optimizer with momenta."""
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def shared(world: World, *, small: bool = True, size: int = 10, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether this rank comes to share this many weights; if not, they are where they were."""
    weights = torch.zeros(size, dtype=dtype, requires_grad=True)
    before = weights.data_ptr()
    result = share(world, sgd([weights]), sgd, small=small)
    assert (weights.data_ptr() == before) == (result is None)
    return result is not None


def test_weights_of_a_small_model_are_shared_on_request() -> None:
    """By itself it is done from 4 MB on: for fewer it takes longer to wait for one another than to copy."""
    assert run_ranks(2, shared) == [True, True]
    assert run_ranks(2, lambda world: shared(world, small=False)) == [False, False]
    assert run_ranks(2, lambda world: shared(world, small=False, size=2**20)) == [True, True]


def test_a_rank_whose_weights_cannot_be_shared() -> None:
    """Then nobody shares."""
    kinds = (torch.float32, torch.float64)
    assert run_ranks(2, lambda world: shared(world, dtype=kinds[world.place.rank])) == [False, False]


def test_ranks_in_other_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their process numbers are others, so that none can open the memory of another one, or tell whether it lives."""
    identities = iter([("host", "container 1"), ("host", "container 2")])
    monkeypatch.setattr(sharing, "host_identity", lambda: next(identities))
    assert run_ranks(2, shared) == [False, False]


def test_no_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said once, and all keep their own."""

    def made(num_bytes: int) -> tuple[HostMemory, Address]:
        raise OSError("Function not implemented")

    monkeypatch.setattr(HostMemory, "made", staticmethod(made))
    assert run_ranks(2, shared) == [False, False]
    said = "each rank keeps weights of its own, since memory cannot be shared: Function not implemented"
    assert capsys.readouterr().err.count(said) == 1


def test_memory_that_another_rank_may_not_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where processes may not look at one another: nobody shares, also where rank 0 has the memory."""

    def opened(address: Address, num_bytes: int) -> HostMemory:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(HostMemory, "opened", staticmethod(opened))
    assert run_ranks(2, shared) == [False, False]
    assert capsys.readouterr().err.count("memory cannot be shared: [Errno 13] Permission denied") == 1


@pytest.mark.parametrize("other", [Rounding(8, 0, 0), None, Rounding(8, 2, 2)])
def test_whether_updates_are_made_in_c(other: Rounding | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranks that all would do it alike; else by torch on all of them, since one may have to finish for another."""
    taken = list[Rounding | None]()

    class Spy(SharedWeights):
        def __init__(self, *arguments: Any) -> None:
            taken.append(arguments[-1])
            super().__init__(*arguments)

    mine = Rounding(8, 0, 0)
    roundings = iter([mine, other])
    monkeypatch.setattr(sharing, "rounding_of", lambda *_: next(roundings))
    monkeypatch.setattr(sharing, "SharedWeights", Spy)
    assert run_ranks(2, shared) == [True, True]
    assert taken == [mine if other == mine else None] * 2
