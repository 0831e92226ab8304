"""The contract of a world, on the world of one and on threads; what ranks do together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from hvd_train.errors import RankLost, UsageError
from hvd_train.world import world as world_module
from hvd_train.world.world import (
    LocalWorld,
    Place,
    Reduction,
    World,
    barrier,
    fill_missing_gradients,
    result_of_rank_0,
    together,
)
from tests.support.contract import *  # noqa: F403  # the tests of the suite
from tests.support.contract import PROMISES, OnRanks
from tests.support.worlds import Fault, Killed, ThreadWorld, run_ranks

pytestmark = pytest.mark.numeric


@pytest.fixture(params=[0, 2, 3], ids=["local", "threads-2", "threads-3"])
def on_ranks(request: pytest.FixtureRequest) -> OnRanks:
    """Runs a body on the world of one, or on so many threads."""
    size: int = request.param

    def run(body: Callable[[World], Any]) -> Any:
        return run_ranks(size, body) if size else body(LocalWorld())

    return run


def test_a_rank_alone_stops_when_it_is_told_to() -> None:
    """There is nobody whom it would have to ask."""
    world = LocalWorld()
    assert (world.requested(), world.requested(told_to_end=True)) == ("train", "stop")


def test_what_is_summed_with_gradients_is_the_sum_called_step() -> None:
    """Tests that play another rank find the numbers of a step by that name, in the world of one as on ranks."""
    given: list[tuple[Any, str]] = []

    class Noting(LocalWorld):
        def start_sum(self, tensor: Any, name: str) -> Any:
            given.append((tensor, name))
            return super().start_sum(tensor, name)

    tensor = torch.ones(2)
    optimizer: Any = None
    assert Noting().sum_with_gradients(optimizer, tensor)() is tensor
    assert [(one is tensor, name) for one, name in given] == [(True, "step")]


def test_every_promise_is_in_the_suite() -> None:
    """No test of the contract can be lost by leaving its name out of the list."""
    import tests.support.contract

    assert [name for name in vars(tests.support.contract) if name.startswith("test_")] == PROMISES


def test_a_rank_that_fails_ends_the_others_and_its_error_is_raised() -> None:
    """The thread world does not hang on a broken rank: the others get RankLost, the caller the cause."""
    met = []

    def body(world: ThreadWorld) -> None:
        if world.place.rank == 1:
            raise ZeroDivisionError("broken")
        try:
            world.sum(torch.ones(1), "never")
        except RankLost:
            met.append(world.place.rank)
            raise

    with pytest.raises(ZeroDivisionError, match="broken"):
        run_ranks(3, body)
    assert sorted(met) == [0, 2]


def test_the_result_of_rank_0s_work_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: the others exchange something with it meanwhile, and do not use their own result."""
    monkeypatch.setattr(world_module, "_EXCHANGE_S", 0.01)
    of_rank_0: Future[str] = Future()
    exchanges = []

    class Counting(ThreadWorld):
        def broadcast(self, value: Any, root: int) -> Any:
            exchanges.append(self.place.rank)
            if self.place.rank == 0 and exchanges.count(0) == 4:
                of_rank_0.set_result("of rank 0")
            return super().broadcast(value, root)

    def body(world: ThreadWorld) -> str:
        counting = Counting(world.place.rank, world._meeting)
        of_another: Future[str] = Future()
        of_another.set_result("of another rank")
        return result_of_rank_0(counting, of_rank_0 if world.place.rank == 0 else of_another)

    assert run_ranks(3, body) == ["of rank 0"] * 3
    assert exchanges.count(0) > 4


class Rank(LocalWorld):
    """A rank of two that sends what it is asked to send, and hears that rank 0 has done its work."""

    def __init__(self, rank: int) -> None:
        self.place = Place(rank, 2)
        self.gathered = list[Any]()

    def broadcast(self, value: Any, root: int) -> Any:
        assert root == 0
        return value if self.place.rank == 0 else (True, "of rank 0")

    def gather(self, value: Any) -> list[Any]:
        self.gathered.append(value)
        return [value] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_between_two_exchanges_rank_0_waits_for_its_work(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """For a second, of which its work may have all; the others wait in the exchange itself, and for no work."""
    waits: list[float] = []
    work: Future[str] = Future()

    def wait(futures: list[Future[str]], timeout: float) -> None:
        waits.append(timeout)
        if len(waits) == 3:
            futures[0].set_result("of rank 0")

    monkeypatch.setattr(world_module, "wait", wait)
    assert result_of_rank_0(Rank(rank), work) == "of rank 0"
    assert waits == ([1.0] * 3 if rank == 0 else [])


def test_a_barrier_is_an_exchange() -> None:
    """Nobody passes it before all have come."""
    world = Rank(1)
    barrier(world)
    assert len(world.gathered) == 1


def test_a_rank_alone_comes_to_its_state_before_it_trains() -> None:
    """Once, and what the body returns is returned."""
    calls: list[str] = []
    assert LocalWorld().run(lambda: calls.append("body") or "trained", lambda: calls.append("sync")) == "trained"
    assert calls == ["sync", "body"]


def test_rank_0_does_not_wait_for_its_work_where_another_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others meet again, and take a rank that does not come for lost."""
    monkeypatch.setattr(world_module, "_EXCHANGE_S", 0.01)

    def body(world: ThreadWorld) -> None:
        if world.place.rank == 1:
            raise Killed("meanwhile")
        with pytest.raises(RankLost):
            result_of_rank_0(world, Future())  # which never ends

    run_ranks(2, body)


def test_a_fault_takes_its_rank_inside_the_reduction_of_its_step() -> None:
    """The rank of a fault is lost in that step; the survivors learn of it inside the same reduction."""

    def body(world: ThreadWorld) -> int:
        model = torch.nn.Linear(2, 1)
        optimizer = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, Reduction())
        done = 0
        try:
            for _ in range(5):
                model(torch.ones(1, 2)).sum().backward()
                with world.reduced(optimizer):
                    optimizer.step()
                    done += 1
        except RankLost:
            pass
        return done

    first, second, third = run_ranks(3, body, [Fault(rank=1, step=3)])
    assert isinstance(second, Killed)
    assert first in (2, 3) and third in (2, 3)


def test_what_fails_on_one_rank_is_raised_on_all() -> None:
    """The error is that of the lowest rank that has one; where there is none, each rank has its own value."""

    def body(world: ThreadWorld) -> str:
        rank = world.place.rank

        def build() -> str:
            if rank > 0:
                raise UsageError(f"rank {rank} has no disk")
            return "built"

        with pytest.raises(UsageError, match="rank 1 has no disk"):
            together(world, build)
        return together(world, lambda: f"rank {rank}")

    assert run_ranks(3, body) == ["rank 0", "rank 1", "rank 2"]


def test_an_error_that_is_not_ours_is_not_shared() -> None:
    """A bug ends its own rank with a traceback; the others learn of it as of any lost rank."""
    with pytest.raises(ZeroDivisionError):
        run_ranks(2, lambda world: together(world, lambda: 1 / world.place.rank))


def test_a_missing_gradient_becomes_zeros_where_one_is_required() -> None:
    """Frozen parameters stay without one, and a gradient that is there stays as it is."""
    first, second, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    first.grad = torch.ones(2)
    frozen.requires_grad_(False)
    fill_missing_gradients(torch.optim.SGD([first, second, frozen], lr=0.1))
    assert first.grad.tolist() == [1.0, 1.0]
    assert second.grad is not None
    assert second.grad.tolist() == [0.0, 0.0]
    assert frozen.grad is None
