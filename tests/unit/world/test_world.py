"""The contract of a world, on the world of one and on threads; work of all ranks together."""

from concurrent.futures import Future

import pytest

from hvd_train.errors import RankLost, UsageError
from hvd_train.world import world as world_module
from hvd_train.world.world import LocalWorld, result_of_rank_0, together
from tests.support.contract import *  # noqa: F403  # the tests of the suite
from tests.support.contract import OnRanks
from tests.support.worlds import Killed, run_ranks


@pytest.fixture(params=[0, 2, 3], ids=["local", "threads-2", "threads-3"])
def on_ranks(request: pytest.FixtureRequest) -> OnRanks:
    size = request.param
    return lambda body: run_ranks(size, body) if size else body(LocalWorld())


def test_all_ranks_get_the_result_of_rank_0() -> None:
    def body(world):
        work = Future()
        work.set_result(f"of rank {world.place.rank}")
        return result_of_rank_0(world, work)

    assert run_ranks(3, body) == ["of rank 0"] * 3


def test_rank_0_does_not_wait_for_its_work_when_another_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world_module, "_EXCHANGE_S", 0.01)

    def body(world):
        if world.place.rank == 1:
            raise Killed("meanwhile")
        with pytest.raises(RankLost):
            result_of_rank_0(world, Future())  # which never ends

    run_ranks(2, body)


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    """The error of the lowest rank counts."""

    def body(world):
        rank = world.place.rank

        def build():
            if rank > 0:
                raise UsageError(f"rank {rank} has no disk")
            return "built"

        with pytest.raises(UsageError, match="rank 1 has no disk"):
            together(world, build)
        return together(world, lambda: f"rank {rank}")

    assert run_ranks(3, body) == ["rank 0", "rank 1", "rank 2"]
