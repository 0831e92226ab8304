"""What elastic training guarantees where ranks die while they meet, and a state is half way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Optimizer

from hvd_train.errors import RankLost, StateLost
from hvd_train.run_files.ledger import audit
from hvd_train.world.gradient import Gradient
from tests.support.elastic import ElasticThreadWorld, Hosts, Kill, KillMeeting, run_elastic
from tests.support.fault_plays import ONE, THREE, TOLERANCE, TWO, check, events_of, play, undisturbed
from tests.support.runs import largest_difference, small_config, trained


@pytest.mark.parametrize("exchange", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_deaths_while_the_ranks_meet(rank: int, exchange: int) -> None:
    """A second fault while the first is being recovered from: wherever in that it strikes, the promises hold."""
    job, folder = play([Kill(7, rank=2), KillMeeting(2, rank, exchange)], ONE, TWO, THREE)
    check(job, folder, undisturbed())


@pytest.mark.parametrize("exchange", [1, 2, 4])
def test_a_first_meeting_that_breaks(exchange: int) -> None:
    """Survivors of it have an optimizer that is wrapped once, and a cut for the world that they come to."""
    worlds: list[ElasticThreadWorld] = []
    config = small_config(epochs=2, ledger=True, output_dir=Path("run"), global_batch_size=None, batch_size=10)

    def body(world: ElasticThreadWorld) -> Any:
        worlds.append(world)
        return trained(world, config)

    run_elastic(body, {"h1": 1, "h2": 1, "h3": 1}, [KillMeeting(1, 1, exchange)], first=3, most=3)
    assert {world.wraps for world in worlds} <= {0, 1}
    assert audit(Path("run")).faults == ()


HALF_WAY = 7  # of the exchanges of a meeting: the state has begun to travel and is not all there


def test_a_rank_that_is_ahead_dies_while_it_sends_its_state() -> None:
    """Those behind still have their own state, whole, and go on from it: the step is taken again."""

    class OnlyRank0Hears(ElasticThreadWorld):
        """The reductions of step 7 are done on rank 0 alone."""

        @contextmanager
        def reduced(self, optimizer: Optimizer) -> Iterator[Gradient]:
            with super().reduced(optimizer) as gradient:
                if self._job.sizes == [3] and self.place.rank > 0 and self._steps == 7:
                    raise RankLost("unheard")
                yield gradient

    job, folder = play([KillMeeting(2, 0, HALF_WAY)], ONE, TWO, THREE, kind=OnlyRank0Hears)
    check(job, folder, undisturbed())
    assert not job.events
    assert events_of(folder)[0]["step"] == 7  # the first after the fault


def test_distrust_outlives_a_fault_while_the_last_commit_is_loaded() -> None:
    """Rank 0 has it already, and so is at another step than a survivor with false weights: these are not taken."""

    class HalfASum(ElasticThreadWorld):
        """The eighth step gives rank 1 false weights."""

        @contextmanager
        def reduced(self, optimizer: Optimizer) -> Iterator[Gradient]:
            with super().reduced(optimizer) as gradient:
                yield gradient
            if self._job.sizes == [4] and self.place.rank == 1 and self._steps == 8:
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.data += 0.01

    events = [Kill(9, rank=3), KillMeeting(2, 2, HALF_WAY)]
    job, folder = play(events, ONE, TWO, THREE, ("h4", 1), kind=HalfASum, commit_steps=6)
    assert not job.events
    assert audit(folder).faults == ()
    assert [event["steps_lost"] for event in events_of(folder)][:1] == [2]
    assert largest_difference(job.results[0][1], undisturbed()) <= TOLERANCE


@pytest.mark.parametrize("exchange", [4, HALF_WAY])
def test_a_newcomer_that_has_half_a_state_goes_on_from_the_last_commit(exchange: int) -> None:
    """The only rank that had a whole one died while it sent it."""
    events = [Hosts(5, (ONE, TWO)), KillMeeting(2, 0, exchange)]
    job, folder = play(events, ONE, commit_steps=1)
    check(job, folder, undisturbed())
    assert not job.events


def test_a_newcomer_that_has_half_a_state_and_no_commit_does_not_train_on_from_it() -> None:
    """It ends, and the job begins again in a new process."""
    with pytest.raises(StateLost, match="no checkpoint yet"):
        play([Hosts(3, (ONE, TWO)), KillMeeting(2, 0, HALF_WAY)], ONE, commit_steps=None, commit_seconds=1000)


def test_a_fresh_state_may_come_from_another_rank_than_the_first() -> None:
    """Rank 0 of the second world has half a state from the first; the newcomer gives its own, with a cut."""
    job, folder = play([KillMeeting(1, 0, HALF_WAY)], ONE, TWO, fewest=2)
    check(job, folder, undisturbed())
    assert not job.events
