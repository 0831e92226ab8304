"""The guarantees of elastic training, with threads as workers and faults as data."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from hvd_train import checkpoint
from hvd_train.elastic.roster import Stage
from hvd_train.launch.workers import Request
from hvd_train.run_files.ledger import audit
from hvd_train.session import Session
from hvd_train.world.world import Gradients, World
from tests.support import runs
from tests.support.elastic import (
    ONE,
    STEPS,
    THREE,
    TOLERANCE,
    TWO,
    ElasticThreadWorld,
    Event,
    Hosts,
    Kill,
    KillMeeting,
    Tell,
    Unheard,
    UnheardSum,
    check,
    events_of,
    play,
    run_elastic,
    undisturbed,
)
from tests.support.launching import records
from tests.support.programs import Stop, played, take
from tests.support.runs import RUN, largest_difference, small_config, trained

PLAIN = functools.cache(undisturbed)
ADAMW = {"optimizer": "adamw", "learning_rate": 0.003}


class Complete(ElasticThreadWorld):
    """Takes no step while a listed slot has no member."""

    def requested(self, *, got_signal: bool = False) -> Request:
        with self._job.changed:
            while self._a_newcomer_is_due():
                self._job.changed.wait(0.1)
        return super().requested(got_signal=got_signal)

    def _a_newcomer_is_due(self) -> bool:
        roster = self._job.roster
        if roster.requested() != "train" or self._job.finish:
            return False
        slots = min(sum(roster.hosts.values()), roster.max_workers)
        whole = all(
            roster.worker(one.number) and one.stage is Stage.TRAINING for one in roster.world
        )
        return whole and len(roster.world) < slots


ALL = (ONE, TWO, THREE)


@pytest.mark.parametrize(
    ("events", "hosts", "sizes"),
    [
        # ranks die in any step or rendezvous
        *(([Kill(step, rank)], ALL, {3, 2}) for step, rank in ((7, 1), (1, 0), (20, 0))),
        ([Kill(11, rank=0), Kill(11, rank=1)], ALL, {3}),
        ([Kill(3, rank=0), Kill(4, rank=0), Kill(5, rank=0)], ALL, {3, 2}),
        *(([Kill(7, rank=2), KillMeeting(2, 0, turn)], ALL, {3, 2}) for turn in (1, 3, 5)),
        # the step of the others counts, and rank 0 logs it although it missed it
        *(([Unheard(step, rank)], ALL, {3}) for step, rank in ((1, 0), (20, 0), (10, 1))),
        # hosts come and go, also that of rank 0
        ([Hosts(4, (TWO, THREE)), Hosts(9, ALL), Hosts(15, (ONE,))], (ONE, TWO), {2, 3, 1}),
        ([Hosts(5, (("h1", 3),))], (ONE,), {1, 3}),
        ([Tell(5, 1), Tell(6, 0), Kill(12, 0), Hosts(12, ALL)], ALL, {3, 2, 1}),
    ],
    ids=str,
)
def test_faults_and_resizes(
    events: list[Event], hosts: tuple[tuple[str, int], ...], sizes: set[int]
) -> None:
    """No finished step is lost, and the weights do not change."""
    kind = Complete if isinstance(events[0], Hosts) else ElasticThreadWorld
    job, folder = play(events, *hosts, kind=kind)
    check(job, folder, PLAIN())
    assert sizes <= {*job.sizes}


@pytest.mark.parametrize(
    ("events", "changes"),
    [
        ([Kill(7, 0), Hosts(12, (TWO, THREE, ("h4", 1)))], ADAMW),
        ([Kill(1, 1), Unheard(11, 0)], {}),
    ],
    ids=["adamw", "a step behind"],
)
def test_survivors_and_newcomers_have_the_whole_state(
    events: list[Event], changes: dict[str, Any]
) -> None:
    """Running statistics, random states, counters, unsaved buffers, momentum and moments."""
    job, folder = play(events, ONE, TWO, THREE, make=runs.remembers, kind=Complete, **changes)
    check(job, folder, undisturbed(runs.remembers, **changes))


@pytest.mark.parametrize("turn", [1, 2])
def test_rank_0_misses_an_evaluation(turn: int) -> None:
    """It writes the epoch's record and the best weights from the state of the others."""
    job, folder = play([UnheardSum("evaluation", 0, turn)], ONE, TWO)
    check(job, folder, undisturbed())
    (alone,) = Path().glob("undisturbed-*")
    best = [torch.load(run / checkpoint.BEST, weights_only=True) for run in (folder, alone)]
    assert largest_difference(*best) <= TOLERANCE


def test_loader_processes_survive() -> None:
    """Images that were read ahead for the broken step are not used for the next step."""
    job, folder = play([Kill(7, rank=1)], ONE, TWO, data=runs.mapped_digits, workers=1)
    check(job, folder, undisturbed(data=runs.mapped_digits))


PER_WORKER = {
    "epochs": 3,
    "on_resize": "per-worker",
    "global_batch_size": None,
    "batch_size": 10,
    "ledger": True,
}


def built_in(world: World) -> None:
    settings = {"schedule": "constant", "warmup_epochs": 0.0, "lr_scaling": "linear"}
    trained(world, small_config(**PER_WORKER, **settings))


def of_ones_own(world: World) -> None:
    """The program sees the size of each step, and sets the learning rate."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            optimizer.param_groups[0]["lr"] = 0.05 * session.global_batch / 256
            take(step, model)
            assert step.scores.count == step.size

    played(world, program, **PER_WORKER)


@pytest.mark.parametrize("loop", [built_in, of_ones_own])
def test_per_worker_batches_and_the_learning_rate_follow_the_world(
    loop: Callable[[World], None],
) -> None:
    """A step that is interrupted keeps its size, for which the learning rate is set already."""
    run_elastic(loop, dict([ONE, TWO]), [Kill(4, rank=1)], first=2, most=2)
    assert audit(RUN).faults == ()
    found = [(step["samples"], step["learning_rate"]) for step in records("step")[:5]]
    whole, half = (pytest.approx(0.05 * size / 256, rel=1e-12) for size in (20, 10))
    assert found == [(20, whole), (40, whole), (60, whole), (80, whole), (90, half)]


@pytest.mark.parametrize(
    ("event", "why"),
    [(Hosts(4, (TWO,)), "hosts came or went"), (Kill(4, rank=0), "a rank was lost")],
    ids=str,
)
def test_a_new_rank_0_writes_into_the_same_folder(event: Event, why: str) -> None:
    """Also without --output-dir; metrics.jsonl has each change of world."""
    config = small_config(epochs=1, output_dir=None, recipe="few", resume="never", ledger=True)
    job = run_elastic(
        lambda world: trained(world, config), dict([ONE, TWO]), [event], first=2, most=2
    )
    (folder,) = Path("runs").iterdir()
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 1, 10)
    assert [event["name"] for event in records("event", folder)].count("start") == 1
    first, *_ = events_of(folder)
    assert (first["previous_size"], first["world_size"], first["why"]) == (2, 1, why)
    assert {result.run_dir for result, _ in job.results} <= {folder, None}


class OtherWeights(ElasticThreadWorld):
    """A world whose rank 1 gets other weights in the eighth step, without an error."""

    @override
    def reduce(self) -> Gradients:
        gradients = super().reduce()
        if len(self._job.sizes) == 1 and self.place.rank == 1 and self._steps == 8:
            for parameter in self._parameters:
                parameter.data += 0.01
        return gradients


@pytest.mark.parametrize("events", [[], [Kill(9, rank=3)]], ids=["commit", "fault"])
def test_ranks_with_different_weights_resume_from_the_last_commit(events: list[Event]) -> None:
    """They find it when they commit or meet again; a host that differs from most is avoided."""
    hosts = (ONE, TWO, THREE, ("h4", 1))
    job, folder = play(events, *hosts, kind=OtherWeights, commit_steps=6)
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS)
    assert all(largest_difference(weights, PLAIN()) <= TOLERANCE for _, weights in job.results)
    used = {worker.host for worker in job.roster.world}
    assert used == ({"h1", "h2", "h3", "h4"} if events else {"h1", "h3", "h4"})
