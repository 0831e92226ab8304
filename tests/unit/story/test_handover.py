"""How newcomers are given the state beside the steps of the others: in parts that stay exact, until all is there."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from hvd_train import checkpoint, handover, transfer
from hvd_train.handover import Handover, next_part, nothing_to_hand_over
from hvd_train.run_files.ledger import audit
from hvd_train.state import TrainState
from hvd_train.world.world import LocalWorld, Request, World
from tests.support import runs
from tests.support.elastic import ElasticThreadWorld, Event, Hosts, Kill, KillMeeting, Tell, Unheard
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
from tests.support.runs import Weights, largest_difference
from tests.support.worlds import DEADLINE_S


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the state of a test's model take six steps to be handed over."""
    monkeypatch.setattr(handover, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(handover, "PART_BYTES", 2000)
    monkeypatch.setattr(handover, "MOST_PARTS", 6)


def of_elements(*counts: int) -> list[handover.Unit]:
    """Return units of float32 weights, of so many elements each, with a float64 number of the optimizer for each."""
    numbers = itertools.count()
    weights = [torch.tensor([float(next(numbers)) for _ in range(count)]) for count in counts]
    return [(weight, weight.double()) for weight in weights]


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    most_bytes=st.integers(1, 100),
)
def test_parts_are_all_of_it_once(counts: list[int], most_bytes: int) -> None:
    """Part after part every element comes once, with its number in the optimizer, and no part is over the limit."""
    units = of_elements(*counts)
    arrived, weights, others = 0, list[float](), list[float]()
    while arrived < sum(counts):
        part, end = next_part(units, arrived, most_bytes)
        assert end > arrived
        assert sum(tensor.nbytes for tensor in part) <= max(12, most_bytes)
        for weight, other in zip(part[::2], part[1::2], strict=True):
            assert weight.tolist() == other.tolist()
            weights += weight.tolist()
            others += other.tolist()
        arrived = end
    assert weights == [float(number) for number in range(sum(counts))]


def test_nothing_to_hand_over_asks_for_nothing() -> None:
    """A world in which all have the state neither sends anything nor wishes for another world."""
    nothing = nothing_to_hand_over(LocalWorld())
    nothing.start_part()()
    assert (nothing.is_under_way, nothing.is_done) == (False, False)


def test_a_handover_is_done_when_all_has_arrived() -> None:
    """It says how much every rank has, and no more than that before the step has waited for it."""
    told: list[int] = []
    giving = Handover(LocalWorld(), 0, of_elements(3, 2), keep=True, begin=1, sent=told.append)
    giving._part_bytes = 24
    assert (giving.arrived, giving.is_under_way, giving.is_done) == (1, True, False)
    wait_for_part = giving.start_part()
    assert giving.arrived == 1
    wait_for_part()
    assert (giving.arrived, giving.is_done) == (3, False)
    giving.start_part()()
    assert (giving.arrived, giving.is_under_way, giving.is_done) == (5, False, True)
    assert told == [24, 24]


@pytest.fixture
def sent_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the ranks that were sent a state, or sent it, while all waited, as it happens."""
    ranks: list[int] = []
    original = transfer.synchronize

    def noted(state: TrainState, world: World, root: int, *, keep: bool = False) -> None:
        ranks.append(world.place.rank)
        original(state, world, root, keep=keep)

    monkeypatch.setattr(transfer, "synchronize", noted)
    return ranks


class Awaited(ElasticThreadWorld):
    """Workers that take a certain step only when somebody has come to join them."""

    step_that_waits: ClassVar[int] = 6

    @override
    def requested(self, *, told_to_end: bool = False) -> Request:
        job = self._job
        with job.changed:
            if self._step == self.step_that_waits and job.sizes == [2]:
                assert job.changed.wait_for(job.roster.wants_change, DEADLINE_S)
        return super().requested(told_to_end=told_to_end)


class Watched(Awaited):
    """Workers of which it is noted what they broadcast beside the steps."""

    num_bytes: ClassVar[list[int]]

    @override
    def start_broadcast(self, tensors: Any, root: int, *, keep: bool = False) -> Any:
        self.num_bytes.append(sum(tensor.nbytes for tensor in tensors))
        return super().start_broadcast(tensors, root, keep=keep)


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """The epochs in metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "epoch"]


def _alone() -> Path:
    """The folder of the last undisturbed run."""
    return max(Path().glob("undisturbed-*"), key=lambda folder: int(folder.name.partition("-")[2]))


def check_files(folder: Path, expected: Weights) -> None:
    """The promises, as far as the run folder tells: a newcomer may lack a part of the state at the end."""
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS), report
    assert all(event["steps_lost"] == 0 for event in events_of(folder))
    assert (written(folder, "step"), written(folder, "epoch")) == ([*range(1, STEPS + 1)], [1, 2])
    assert largest_difference(torch.load(folder / checkpoint.FINAL, weights_only=True), expected) <= TOLERANCE


def newcomer_joins(
    *events: Event, at: int = 4, hosts: tuple[tuple[str, int], ...] = (ONE, TWO, THREE), **given: Any
) -> tuple[Any, Path, list[int]]:
    """Two train, and others come at a step; also what was sent beside each step, as noted by each rank."""

    class Noted(Watched):
        step_that_waits = at + 2
        num_bytes: ClassVar[list[int]] = []

    job, folder = play([Hosts(at, hosts), *events], ONE, TWO, kind=Noted, **{"commit_steps": 5, **given})
    return job, folder, Noted.num_bytes


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("make", [runs.convnet, runs.batch_norm, runs.remembers], ids=lambda make: make.__name__)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_newcomer_is_given_the_state_while_the_others_train(
    make: Any, optimizer: str, sent_at_once: list[int]
) -> None:
    """Until all of it is there it computes nothing; then all meet, and nothing has to be sent any more."""
    given = {"optimizer": optimizer, "learning_rate": 0.01, "weight_decay": 0.01}
    job, folder, num_bytes = newcomer_joins(make=make, **given)
    assert sorted(sent_at_once) == [0, 1]  # when the job began
    check(job, folder, undisturbed(make, **given))
    assert job.sizes == [2, 3, 3]
    came, again = events_of(folder)
    assert again["step"] - came["step"] >= 6
    assert "newcomers have the state" in again["message"]
    assert max(num_bytes) <= max(2000, sum(num_bytes) / 3 / 6)
    assert len(num_bytes) == 3 * (again["step"] - came["step"] - 1)  # all was there one step before


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "settings",
    [
        {"ema_decay": 0.9},
        {"clip_norm": 0.1, "nesterov": True},
        {"freeze": "0.*", "unfreeze": ("1:0.*",)},
        {"momentum": 0.0},
        {"augment": "none", "channels_last": "on"},
    ],
    ids=str,
)
def test_whatever_the_state_is_made_of(settings: dict[str, Any], sent_at_once: list[int]) -> None:
    """The final weights are those of the undisturbed run; in the second epoch frozen weights are thawed."""
    _, folder, num_bytes = newcomer_joins(at=6, **settings)
    assert num_bytes
    assert sorted(sent_at_once) == [0, 1]  # when the job began
    undisturbed(**settings)
    assert audit(folder).faults == ()
    final, of_alone = (torch.load(run / checkpoint.FINAL, weights_only=True) for run in (folder, _alone()))
    assert largest_difference(final, of_alone) <= TOLERANCE
    assert [event["steps_lost"] for event in events_of(folder)] == [0, 0]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("settings", [{"optimizer": "lamb"}, {"sync_batch_norm": True}], ids=str)
def test_what_cannot_be_given_in_parts_is_given_at_once(settings: dict[str, Any]) -> None:
    """Optimizers that look at whole weights need all of them, and synchronized batch norm every rank in each pass."""
    job, folder, num_bytes = newcomer_joins(make=runs.batch_norm, **settings)
    assert (job.sizes, num_bytes) == ([2, 3], [])
    assert audit(folder).faults == ()


def test_a_small_state_is_given_at_once() -> None:
    """A second meeting would take longer."""
    job, folder, num_bytes = newcomer_joins()
    check(job, folder, undisturbed())
    assert (job.sizes, num_bytes) == ([2, 3], [])


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "event",
    [
        Kill(8, rank=0),
        Kill(8, rank=1),
        Kill(8, rank=2),
        Unheard(8, rank=0),
        Unheard(8, rank=1),
        Unheard(8, rank=2),
        Tell(8, rank=0),
        Tell(8, rank=2),
        KillMeeting(2, 0, 4),
        KillMeeting(2, 2, 4),
        KillMeeting(3, 0, 1),
        KillMeeting(3, 2, 1),
    ],
    ids=str,
)
def test_faults_beside_a_handover(event: Event) -> None:
    """Whoever dies, or misses the end of a step: the giver, the newcomer or another one, nothing is lost."""
    job, folder, _ = newcomer_joins(event)
    assert event not in job.events
    check_files(folder, undisturbed())


@pytest.mark.usefixtures("small_parts")
def test_a_newcomer_that_misses_the_end_of_a_step_is_given_all_of_it_anew(sent_at_once: list[int]) -> None:
    """What it has is that of the step before, and would never be the state of the others."""
    _, folder, _ = newcomer_joins(Unheard(9, rank=2))
    assert sorted(sent_at_once) == [0, 1]  # when the job began
    check_files(folder, undisturbed())


@pytest.mark.usefixtures("small_parts")
def test_another_newcomer_does_not_take_from_the_first_what_it_has() -> None:
    """Both take part in the steps from then on, and what the first lacks goes to both."""
    job, folder, _ = newcomer_joins(Hosts(7, (ONE, TWO, THREE, FOUR)))
    check(job, folder, undisturbed())
    assert job.sizes[:3] == [2, 3, 4]


@pytest.mark.usefixtures("small_parts")
def test_the_giver_is_lost_and_another_goes_on_giving(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the newcomer has by then stays good, so the second giver does not begin again."""
    begun: list[int] = []
    original = Handover.__init__

    def noted(self: Handover, *args: Any, begin: int = 0, **named: Any) -> None:
        if args[2]:
            begun.append(begin)
        original(self, *args, begin=begin, **named)

    monkeypatch.setattr(Handover, "__init__", noted)
    _, folder, _ = newcomer_joins(Kill(9, rank=0))
    check_files(folder, undisturbed())
    assert begun[:3] == [0, 0, 0]
    assert begun[3] == begun[4] > 0  # on the two that are left


@pytest.mark.usefixtures("small_parts")
def test_a_training_may_end_while_a_newcomer_lacks_a_part() -> None:
    """Its weights are not compared with those of the others, nor is it asked to evaluate with them."""
    in_turns = {"eval_batch_size": 4}  # every rank would have some of the validation set
    _, folder, _ = newcomer_joins(at=17, **in_turns)
    check_files(folder, undisturbed(**in_turns))
    of_both = [epochs_of(run)[-1]["val_loss"] for run in (folder, _alone())]
    assert of_both[0] == pytest.approx(of_both[1], rel=TOLERANCE)


@pytest.mark.usefixtures("small_parts")
def test_a_newcomer_whose_state_is_another_one_is_given_it_again(sent_at_once: list[int]) -> None:
    """Then all wait: what went wrong beside the steps could do so again."""

    class Garbles(Awaited):
        """One of the parts arrives as other numbers."""

        @override
        def start_broadcast(self, tensors: Any, root: int, *, keep: bool = False) -> Any:
            wait = super().start_broadcast(tensors, root, keep=keep)

            def garbled() -> None:
                wait()
                if not keep:
                    tensors[0].add_(1)

            return garbled

    job, folder = play([Hosts(4, (ONE, TWO, THREE))], ONE, TWO, kind=Garbles, commit_steps=5)
    assert sorted(sent_at_once) == [0, 0, 1, 1, 2]
    check(job, folder, undisturbed())
    assert job.sizes == [2, 3, 3]


EVENTS = st.one_of(
    st.builds(Kill, st.integers(1, STEPS), rank=st.integers(0, 2)),
    st.builds(
        Hosts, st.integers(1, STEPS), st.lists(st.sampled_from([ONE, TWO, THREE]), min_size=1, unique=True).map(tuple)
    ),
)


@pytest.mark.usefixtures("small_parts")
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENTS, max_size=4))
def test_any_history(events: list[Event]) -> None:
    """Any sequence of deaths and host lists keeps the promises, whoever is being given the state meanwhile."""
    _, folder = play(events, ONE, TWO, THREE, commit_steps=1)
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS), report
    if "weights" not in ANSWER:
        ANSWER["weights"] = undisturbed()
    final = torch.load(folder / checkpoint.FINAL, weights_only=True)
    assert largest_difference(final, ANSWER["weights"]) <= TOLERANCE


ANSWER: dict[str, Weights] = {}
