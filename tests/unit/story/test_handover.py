"""Newcomers get the state while the others train: in parts that stay exact, until all of it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typing_extensions import override

from hvd_train import checkpoint, handover, transfer
from hvd_train.run_files.ledger import audit
from hvd_train.state import TrainState
from hvd_train.world.world import Request, World
from tests.support import runs
from tests.support.elastic import ElasticThreadWorld, Event, Hosts, Job, Kill, KillMeeting, Tell, Unheard
from tests.support.fault_plays import (
    FOUR,
    ONE,
    STEPS,
    THREE,
    TOLERANCE,
    TWO,
    check,
    events_of,
    play,
    undisturbed,
    written,
)
from tests.support.runs import equal, largest_difference
from tests.support.worlds import DEADLINE_S
from tests.unit.story.test_training import check_any_history


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(handover, "PART_BYTES", 2000)
    monkeypatch.setattr(handover, "MOST_PARTS", 6)


@pytest.fixture
def sent_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the ranks that sent or received a whole state while all waited."""
    ranks: list[int] = []
    original = transfer.synchronize

    def noted(state: TrainState, world: World, root: int, *, keep: bool = False) -> None:
        ranks.append(world.place.rank)
        original(state, world, root, keep=keep)

    monkeypatch.setattr(transfer, "synchronize", noted)
    return ranks


class Awaited(ElasticThreadWorld):
    """Workers that take certain steps only when a newcomer has come; by step, the worlds that there were before."""

    steps_that_wait: ClassVar[dict[int, list[int]]] = {}

    @override
    def requested(self, *, told_to_end: bool = False) -> Request:
        job = self._job
        with job.changed:
            if self.steps_that_wait.get(self._step) == job.sizes:
                assert job.changed.wait_for(job.roster.wants_change, DEADLINE_S)
        return super().requested(told_to_end=told_to_end)


def newcomer_joins(*events: Event, at: int = 4, kind: type[Awaited] = Awaited, **given: Any) -> tuple[Job, Path]:
    """Let two workers train and others join them at a step; return the job and its run folder."""

    class JoinsAt(kind):  # type: ignore[valid-type,misc]
        steps_that_wait: ClassVar[dict[int, list[int]]] = {**kind.steps_that_wait, at + 2: [2]}

    return play([Hosts(at, (ONE, TWO, THREE)), *events], ONE, TWO, kind=JoinsAt, **{"commit_steps": 5, **given})


def final_weights_of_undisturbed(**given: Any) -> runs.Weights:
    """Return the final weights of the same training without faults: the moving average, if there is one."""
    undisturbed(**given)
    folder = max(Path().glob("undisturbed-*"), key=lambda path: int(path.name.partition("-")[2]))
    weights: runs.Weights = torch.load(folder / checkpoint.FINAL, weights_only=True)
    return weights


def check_files(folder: Path, expected: runs.Weights) -> None:
    """Assert the promises as far as the run folder shows them: a newcomer may lack a part of the state at the end."""
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS), report
    assert all(event["steps_lost"] == 0 for event in events_of(folder))
    assert (written(folder, "step"), written(folder, "epoch")) == ([*range(1, STEPS + 1)], [1, 2])
    assert largest_difference(torch.load(folder / checkpoint.FINAL, weights_only=True), expected) <= TOLERANCE


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (runs.convnet, {"ema_decay": 0.9, "clip_norm": 0.1, "nesterov": True}),
        (runs.convnet, {"freeze": "0.*", "unfreeze": ("1:0.*",), "at": 6}),
        (runs.convnet, {"augment": "none", "channels_last": "on", "optimizer": "adam", "learning_rate": 0.01}),
        (runs.batch_norm, {}),
        (runs.remembers, {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.01}),
    ],
)
def test_a_newcomer_gets_the_state_while_the_others_train(
    make: Any, given: dict[str, Any], sent_at_once: list[int]
) -> None:
    """It computes nothing until all of it is there; then all meet, and nothing more has to be sent."""
    job, folder = newcomer_joins(make=make, **given)
    assert sorted(sent_at_once) == [0, 1], "more was sent at once than when the job began"
    given.pop("at", None)
    check_files(folder, final_weights_of_undisturbed(make=make, **given))
    weights = [weights for _, weights in job.results]
    assert all(equal(weights[0], other) for other in weights)
    assert job.sizes == [2, 3, 3]
    came, again = events_of(folder)
    assert again["step"] - came["step"] >= 6
    assert "newcomers have the state" in again["message"]


@pytest.mark.parametrize("given", [{}, {"optimizer": "lamb"}, {"sync_batch_norm": True}], ids=str)
def test_some_states_are_given_at_once(given: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Small ones, since a second meeting would take longer; LAMB and sync-batch-norm cannot do with a part."""
    if given:
        request.getfixturevalue("small_parts")
    job, folder = newcomer_joins(make=runs.batch_norm, **given)
    assert job.sizes == [2, 3]
    if "sync_batch_norm" in given:  # statistics over all ranks are not those of one
        assert audit(folder).faults == ()
    else:
        check_files(folder, undisturbed(runs.batch_norm, **given))


FAULTS = [Kill(8, 0), Kill(8, 1), Kill(8, 2), Unheard(8, 0), Unheard(8, 2), Tell(8, 0), KillMeeting(2, 2, 4)]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("event", [*FAULTS, pytest.param(KillMeeting(3, 0, 1), marks=pytest.mark.slow)], ids=str)
def test_a_fault_during_a_handover_loses_nothing(event: Event) -> None:
    """The giver, the newcomer or another rank dies, is told to end, or misses the end of a step."""
    job, folder = newcomer_joins(event)
    assert event not in job.events
    check_files(folder, undisturbed())


@pytest.mark.usefixtures("small_parts")
def test_a_second_newcomer_does_not_take_from_the_first_what_it_has() -> None:

    class TwoCome(Awaited):
        steps_that_wait: ClassVar[dict[int, list[int]]] = {9: [2, 3]}

    job, folder = newcomer_joins(Hosts(7, (ONE, TWO, THREE, FOUR)), kind=TwoCome)
    check(job, folder, undisturbed())
    assert job.sizes[:3] == [2, 3, 4]


@pytest.mark.usefixtures("small_parts")
def test_a_training_may_end_while_a_newcomer_lacks_a_part() -> None:
    """Its weights are not compared with those of the others, and it does not evaluate with them."""
    in_turns = {"eval_batch_size": 4}  # every rank would have some of the validation set
    _, folder = newcomer_joins(at=17, **in_turns)
    check_files(folder, undisturbed(**in_turns))
    alone = max(Path().glob("undisturbed-*"), key=lambda path: int(path.name.partition("-")[2]))
    lines = [(run / "metrics.jsonl").read_text().splitlines() for run in (folder, alone)]
    losses = [[json.loads(line)["val_loss"] for line in of_run if '"val_loss"' in line][-1] for of_run in lines]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("plays", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_any_history(plays: int) -> None:
    """Any sequence of deaths and host lists keeps the promises, whoever is being given the state meanwhile."""
    check_any_history(plays, lambda job, folder: torch.load(folder / checkpoint.FINAL, weights_only=True))
