"""What elastic training guarantees if ranks die or differ while they synchronize the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.optim import Optimizer
from typing_extensions import override

from hvd_train import checkpoint, transfer
from hvd_train.errors import RankLost, ReplicasDiffer
from hvd_train.run_files.ledger import audit
from hvd_train.state import Snapshot, TrainState
from tests.support.elastic import ElasticThreadWorld, Event, Hosts, Kill, KillMeeting, Unheard, run_elastic
from tests.support.fault_plays import ONE, STEPS, THREE, TOLERANCE, TWO, check, events_of, play
from tests.support.runs import largest_difference, small_config, trained
from tests.unit.story.test_training import PLAIN, Complete

# Exchanges of a rendezvous: a part of the state has been sent; ranks have loaded it and are about to compare.
HALF_WAY, LOADED = 7, 13


@pytest.mark.parametrize(("rank", "exchange"), [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 1), (1, 3), (1, 5)])
def test_a_death_during_a_rendezvous(rank: int, exchange: int) -> None:
    job, folder = play([Kill(7, rank=2), KillMeeting(2, rank, exchange)], ONE, TWO, THREE)
    check(job, folder, PLAIN())


def test_survivors_with_equal_states_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = set[int]()
    original = transfer.synchronize

    def counted(state: TrainState, world: ElasticThreadWorld, root: int) -> None:
        worlds.add(len(world._job.sizes))
        original(state, world, root)

    monkeypatch.setattr(transfer, "synchronize", counted)
    job, _ = play([Kill(7, rank=0)], ONE, TWO, THREE)
    assert job.sizes[:2] == [3, 2]
    assert 1 in worlds
    assert 2 not in worlds


@pytest.mark.parametrize(("rank", "exchange"), [(1, 1), (1, 4), (0, 4), (0, HALF_WAY), (0, LOADED)])
def test_a_death_in_the_first_rendezvous(rank: int, exchange: int) -> None:
    """A rank that was being sent the first state still has its own, with which another rank 0 can begin."""
    job, folder = play([KillMeeting(1, rank, exchange)], ONE, TWO, fewest=2)
    check(job, folder, PLAIN())
    assert not job.events


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


@pytest.mark.parametrize(("exchange", "commit_steps"), [(4, 1), (HALF_WAY, 1), (LOADED, None)])
def test_a_newcomer_that_outlives_the_sender_loses_no_step(exchange: int, commit_steps: int | None) -> None:
    """It resumes from the last commit, or from the state that it has loaded."""
    events = [Hosts(5, (ONE, TWO)), KillMeeting(2, 0, exchange)]
    job, folder = play(events, ONE, commit_steps=commit_steps, commit_seconds=1000, kind=Complete)
    check(job, folder, PLAIN())
    assert not job.events


def test_a_newcomer_that_outlives_the_sender_starts_again_if_there_is_no_commit() -> None:
    """What it had received is not used; the ledger and the weights are those of one whole run."""
    events = [Hosts(3, (ONE, TWO)), KillMeeting(2, 0, HALF_WAY)]
    job, folder = play(events, ONE, commit_steps=None, commit_seconds=1000, kind=Complete)
    assert not job.events
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS), report
    assert largest_difference(job.results[0][1], PLAIN()) <= TOLERANCE


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
    """Neither state is committed."""
    config = small_config(epochs=1)
    with pytest.raises(ReplicasDiffer, match="the survivors of a fault hold different weights, and there is no check"):
        run_elastic(lambda world: trained(world, config), {"h1": 3}, [Kill(9, rank=2)], first=3, most=3, kind=HalfASum)
    assert checkpoint.committed(Path("run")) == []


@pytest.mark.parametrize("events", [[Kill(9, rank=3)], [Kill(9, rank=3), KillMeeting(2, 2, HALF_WAY)]], ids=str)
def test_survivors_that_differ_go_back_to_the_last_commit(events: list[Event]) -> None:
    """Also if another fault interrupts the reload, after rank 0 and before a survivor with wrong weights."""
    job, folder = play(events, ONE, TWO, THREE, ("h4", 1), kind=HalfASum, commit_steps=6)
    assert not job.events
    assert audit(folder).faults == ()
    assert [event["steps_lost"] for event in events_of(folder)][:1] == [2]
    assert largest_difference(job.results[0][1], PLAIN()) <= TOLERANCE


@pytest.mark.parametrize(
    ("hosts", "event"),
    [([ONE], Hosts(7, (ONE, TWO))), ([ONE, TWO], Kill(7, rank=0)), ([ONE, TWO], Unheard(7, rank=0))],
    ids=["newcomer", "newcomer, new rank 0", "rank 0, a step behind"],
)
def test_a_rank_that_differs_after_loading_ends_the_job(
    hosts: list[tuple[str, int]], event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are neither trained on nor committed."""
    load = TrainState.load

    def load_otherwise(state: TrainState, snapshot: Snapshot) -> None:
        load(state, snapshot)
        if state.progress.step:
            state.model.get_parameter("4.bias").data += 1

    monkeypatch.setattr(TrainState, "load", load_otherwise)
    limits = {"first": len(hosts), "fewest": len(hosts), "most": 2}
    with pytest.raises(ReplicasDiffer, match=r"ranks 1 hold .*: rank 1 in 4\.bias$"):
        run_elastic(lambda world: trained(world, small_config()), dict(hosts), [event], kind=Complete, **limits)
    assert checkpoint.committed(Path("run")) == []
