"""Memory that all ranks see."""

import os

import pytest
import torch

from hvd_train.world.buckets import memory_of_ranks
from tests.support.worlds import ThreadWorld, run_ranks


def test_each_rank_sees_what_the_others_write() -> None:
    def body(world: ThreadWorld) -> list[int]:
        of_ranks = memory_of_ranks(world, 1000)
        assert [memory.shape for memory in of_ranks] == [(1000,)] * 3
        of_ranks[world.place.rank] += world.place.rank + 1
        world.gather(None)
        return [int(memory.sum()) for memory in of_ranks]

    assert run_ranks(3, body) == [[1000, 2000, 3000]] * 3


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_without_memory_for_one_rank_none_shares(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, calls = getattr(os, call), list[None]()

    def second_fails(*arguments: object) -> object:
        calls.append(None)
        if len(calls) == 2:
            raise OSError("no memory")
        return function(*arguments)

    monkeypatch.setattr(os, call, second_fails)
    assert run_ranks(3, lambda world: memory_of_ranks(world, 1000)) == [[]] * 3
    assert torch.equal(run_ranks(1, lambda world: memory_of_ranks(world, 3))[0][0], torch.zeros(3, dtype=torch.uint8))
