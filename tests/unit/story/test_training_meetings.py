"""What elastic training guarantees if ranks die or come apart while they synchronize the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Optimizer
from typing_extensions import override

from hvd_train import checkpoint
from hvd_train.errors import RankLost, ReplicasDiffer, StateLost
from hvd_train.run_files.ledger import audit
from hvd_train.state import TrainState
from tests.support.elastic import ElasticThreadWorld, Event, Hosts, Kill, KillMeeting, Unheard, run_elastic
from tests.support.fault_plays import ONE, THREE, TOLERANCE, TWO, check, events_of, play
from tests.support.runs import largest_difference, small_config, trained
from tests.unit.story.test_training import PLAIN, Complete

HALF_WAY = 7  # exchanges of a meeting: the state has begun to travel and is not all there


@pytest.mark.parametrize(("rank", "exchange"), [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 1), (1, 3), (1, 5)])
def test_deaths_while_the_ranks_meet(rank: int, exchange: int) -> None:
    job, folder = play([Kill(7, rank=2), KillMeeting(2, rank, exchange)], ONE, TWO, THREE)
    check(job, folder, PLAIN())


@pytest.mark.parametrize("exchange", [1, 4])
def test_a_first_meeting_that_breaks(exchange: int) -> None:
    config = small_config(epochs=2, ledger=True, global_batch_size=None, batch_size=10)
    events = [KillMeeting(1, 1, exchange)]
    job = run_elastic(lambda world: trained(world, config), dict([ONE, TWO, THREE]), events, first=3, most=3)
    assert not job.events
    assert audit(Path("run")).faults == ()


def test_a_rank_that_is_ahead_dies_while_it_sends_its_state() -> None:
    """Ranks behind still have their own whole state and take the step again."""

    class OnlyRank0Hears(ElasticThreadWorld):
        """The reductions of step 7 are done on rank 0 alone."""

        @override
        @contextmanager
        def reduced(self, optimizer: Optimizer) -> Iterator[None]:
            with super().reduced(optimizer):
                if self._job.sizes == [3] and self.place.rank > 0 and self._steps == 7:
                    raise RankLost("unheard")
                yield

    job, folder = play([KillMeeting(2, 0, HALF_WAY)], ONE, TWO, THREE, kind=OnlyRank0Hears)
    check(job, folder, PLAIN())
    assert not job.events
    assert events_of(folder)[0]["step"] == 7  # the first after the fault


@pytest.mark.parametrize("exchange", [4, HALF_WAY])
def test_a_newcomer_with_half_a_state_resumes_from_the_last_commit(exchange: int) -> None:
    events = [Hosts(5, (ONE, TWO)), KillMeeting(2, 0, exchange)]
    job, folder = play(events, ONE, commit_steps=1, kind=Complete)
    check(job, folder, PLAIN())
    assert not job.events


def test_a_newcomer_with_half_a_state_and_no_commit_ends() -> None:
    events = [Hosts(3, (ONE, TWO)), KillMeeting(2, 0, HALF_WAY)]
    with pytest.raises(StateLost, match="no checkpoint yet"):
        play(events, ONE, commit_steps=None, commit_seconds=1000, kind=Complete)


def test_a_fresh_state_may_come_from_another_rank_than_the_first() -> None:
    """Rank 0 of the second world has half a state from the first; the newcomer gives its own."""
    job, folder = play([KillMeeting(1, 0, HALF_WAY)], ONE, TWO, fewest=2)
    check(job, folder, PLAIN())
    assert not job.events


def test_a_newcomer_knows_the_folder_of_the_job_before_it_has_its_state() -> None:
    """If the others die meanwhile it resumes from their commit, without --output-dir too."""
    config = small_config(epochs=2, output_dir=None, recipe="few", resume="never", ledger=True, commit_steps=1)
    events = [Hosts(5, (ONE, TWO)), KillMeeting(2, 0, 4)]
    job = run_elastic(lambda world: trained(world, config), dict([ONE]), events, first=1, most=2, kind=Complete)
    assert not job.events
    (folder,) = Path("runs").iterdir()
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, 20)


class HalfASum(ElasticThreadWorld):
    """A reduction that is reported as done gives rank 1 of the first world other weights, in the eighth step."""

    @override
    @contextmanager
    def reduced(self, optimizer: Optimizer) -> Iterator[None]:
        with super().reduced(optimizer):
            yield
        if len(self._job.sizes) == 1 and self.place.rank == 1 and self._steps == 8:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.data += 0.01


def test_survivors_that_differ_before_the_first_commit_end_the_job() -> None:
    """None of the two states is committed as if it were the right one."""
    config = small_config(epochs=1)
    with pytest.raises(ReplicasDiffer, match="the survivors of a fault hold different weights, and there is no check"):
        run_elastic(lambda world: trained(world, config), {"h1": 3}, [Kill(9, rank=2)], first=3, most=3, kind=HalfASum)
    assert checkpoint.committed(Path("run")) == []


@pytest.mark.parametrize("events", [[Kill(9, rank=3)], [Kill(9, rank=3), KillMeeting(2, 2, HALF_WAY)]], ids=str)
def test_survivors_that_differ_go_back_to_the_last_commit(events: list[Event]) -> None:
    """Also if another fault comes while it is loaded, when rank 0 has it and a survivor still has false weights."""
    job, folder = play(events, ONE, TWO, THREE, ("h4", 1), kind=HalfASum, commit_steps=6)
    assert not job.events
    assert audit(folder).faults == ()
    assert [event["steps_lost"] for event in events_of(folder)][:1] == [2]
    assert largest_difference(job.results[0][1], PLAIN()) <= TOLERANCE


def spoil(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Let what a rank has loaded in a meeting, but not the first one, differ from what it was sent."""
    load = getattr(TrainState, method)

    def load_otherwise(state: TrainState, values: Any) -> None:
        load(state, values)
        if state.progress.step:
            state.model.get_parameter("4.bias").data += 1

    monkeypatch.setattr(TrainState, method, load_otherwise)


@pytest.mark.parametrize(
    ("hosts", "event"),
    [([ONE], Hosts(7, (ONE, TWO))), ([ONE, TWO], Kill(7, rank=0))],
    ids=["same rank 0", "new rank 0"],
)
def test_a_newcomer_that_comes_apart_ends_the_job_after_a_commit(
    hosts: list[tuple[str, int]], event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 commits, also one that has the folder only since this meeting."""
    spoil(monkeypatch, "load_values")
    limits = {"first": len(hosts), "fewest": len(hosts), "most": 2}
    with pytest.raises(ReplicasDiffer, match=r"rank 1 in 4\.bias; what rank 0 holds is committed"):
        run_elastic(lambda world: trained(world, small_config()), dict(hosts), [event], kind=Complete, **limits)
    (commit,) = checkpoint.committed(Path("run"))
    assert checkpoint.read(commit)["progress"]["step"] >= 6


def test_a_rank_0_that_comes_apart_does_not_commit_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was behind, and has not become what the others are."""
    spoil(monkeypatch, "load_buffers")
    config = small_config(epochs=1)
    with pytest.raises(ReplicasDiffer, match=r"differ: rank 1 in 4\.bias; what rank 0 holds is NOT committed"):
        run_elastic(lambda world: trained(world, config), {"h1": 2}, [Unheard(4, rank=0)], first=2, most=2)
    assert checkpoint.committed(Path("run")) == []
