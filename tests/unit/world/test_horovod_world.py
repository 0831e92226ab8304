"""`HorovodWorld` without other ranks; tests/parallel runs the contract of a world on real ranks."""

import os
from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
import torch

from hvd_train.errors import RankLost
from hvd_train.world.horovod_world import HorovodInternalError, HorovodWorld, hvd
from hvd_train.world.world import Place


class FourRanks(HorovodWorld):
    """Rank 1 of four, on a host with two; no other rank is there."""

    def _connect(self) -> None:
        self.place = Place(1, 4, 1, 2)


@pytest.mark.parametrize(
    "operation",
    [
        lambda world: world.start_sum(torch.ones(1), "x")(),
        lambda world: world.broadcast("value", root=1),
        lambda world: world.broadcast_tensors([torch.ones(1)], 0),
        lambda world: world.gather("value"),
    ],
    ids=["sum", "broadcast", "tensors", "gather"],
)
@pytest.mark.parametrize("found_at", ["begin", "wait"])
def test_an_operation_that_breaks_is_a_lost_rank(
    operation: Callable[[FourRanks], object], found_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error may come when an operation begins or when it is awaited; the
    user reads its first line.
    """
    broken = Mock(side_effect=HorovodInternalError("connection closed\nby peer"))
    for name in ("broadcast", "allgather", "synchronize"):
        monkeypatch.setattr(hvd, name, broken)
    for name in ("broadcast_async_", "allreduce_async_"):
        monkeypatch.setattr(hvd, name, broken if found_at == "begin" else Mock())
    with patch.dict(os.environ), pytest.raises(RankLost) as lost:  # a world sets variables
        operation(FourRanks())
    assert str(lost.value) == "connection closed"
