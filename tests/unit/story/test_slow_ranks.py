"""A slow rank has a name: ranks as threads, whose time passes by their work and their waits."""

import shutil
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

from hvd_train import membership
from hvd_train.progress.clock import Split, TrainingClock
from hvd_train.report.facts import facts
from hvd_train.run_files.history import read
from hvd_train.run_files.ledger import audit
from hvd_train.session import Session
from hvd_train.world.world import PendingSum
from tests.support.elastic import TOLERANCE
from tests.support.launching import notes, records
from tests.support.programs import DATA, Outcome, losses, played
from tests.support.runs import RUN, Weights, largest_difference
from tests.support.worlds import ThreadWorld, own_generator, run_ranks


class Clock(threading.local):
    """The clock of this thread's rank."""

    time = 0.0


CLOCK = Clock()


def now() -> float:
    return CLOCK.time


class TimedWorld(ThreadWorld):
    """A rank waits for the latest one."""

    begun: ClassVar[dict[Any, list[float]]] = defaultdict(list)

    @override
    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        begun = self.begun[name, self._turns[f"sum {name}"]]
        begun.append(CLOCK.time)
        wait = super().start_sum(tensor, name)

        def timed() -> Tensor:
            total = wait()
            CLOCK.time = max(CLOCK.time, *begun)
            return total

        return timed


class Data(TensorDataset):
    """Samples that take time on a slow rank."""

    def __init__(self, work: Any) -> None:
        super().__init__(*DATA[:24])
        self.work = work

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        self.work("data")
        return super().__getitem__(number)


def network(work: Any, norm: nn.Module) -> nn.Module:
    """Return a network that takes time for its passes."""
    model = own_generator(nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 3)))
    model.register_forward_pre_hook(lambda *_: work("forward"))
    model[2].register_full_backward_hook(lambda *_: work("backward"))
    return model


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainings read the clock of their rank."""
    monkeypatch.setattr(
        membership, "TrainingClock", lambda seconds, _: TrainingClock(seconds, Split(now), now)
    )


def train(
    world: ThreadWorld, place: str, until: int, norm: Callable[[], nn.Module], **settings: Any
) -> Outcome:
    """Train while rank 1 is slow at a place of its program, until a step."""
    step_number = 0

    def work(at: str) -> None:
        is_slow = world.place.rank == 1 and at == place and step_number < until
        CLOCK.time += 0.3 + 3 * is_slow

    def program(session: Session, model: Any, *_: Any) -> None:
        nonlocal step_number
        for step in session.steps():
            step_number = step.number
            for micro in step:
                micro.backward(losses(model, micro.batch))
                work("after a pass")
        session.evaluate(Data(work), lambda model, batch: {"loss": model(batch[0])[:, 0]})

    return played(world, program, make=lambda: network(work, norm()), data=Data(work), **settings)


@pytest.mark.parametrize(
    ("place", "phase", "sync_batch_norm"),
    [
        ("data", "data", False),
        ("forward", "forward", True),
        ("backward", "backward", True),
        ("after a pass", "other", False),
    ],
)
def test_a_slow_rank_is_named_with_host_and_phase(
    place: str, phase: str, sync_batch_norm: bool
) -> None:
    """Once, and once more when it has recovered; also if the layers of the others wait for it."""
    settings = {"epochs": 25, "global_batch_size": 12, "sync_batch_norm": sync_batch_norm}
    TimedWorld.begun.clear()
    run_ranks(
        3,
        lambda world: train(world, place, 20, lambda: nn.BatchNorm1d(8), **settings),
        kind=TimedWorld,
    )
    events = [event for event in records("event") if event["name"] in ("slow", "recovered")]
    assert [(event["name"], event["rank"]) for event in events] == [("slow", 1), ("recovered", 1)]
    assert events[0]["phase"] == phase
    assert events[0]["factor"] > 1.2
    assert f"rank 1 on {events[0]['host']} is " in events[0]["message"]
    assert any(step["ranks"] for step in records("step"))
    assert "work in a step: slowest " in facts(read(RUN))["workers"]


def test_a_slow_rank_takes_fewer_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have different processors. The weights are the same as with equal ones, each sample
    counts once, and shares go back after 40 steps.
    """

    def weights_on_ranks() -> Weights:
        settings = {"epochs": 60, "global_batch_size": 24, "batch_size": 2, "ledger": True}
        body = lambda world: train(world, "forward", 40, nn.Identity, **settings)  # noqa: E731
        return run_ranks(3, body, kind=TimedWorld)[0][0]

    equal = weights_on_ranks()
    assert not any(event["name"] == "shares" for event in records("event"))
    shutil.rmtree(RUN)
    monkeypatch.setattr(membership, "processor", lambda: f"of rank {threading.get_ident()}")
    shared = weights_on_ranks()
    first, *_, last = [event for event in records("event") if event["name"] == "shares"]
    assert first["owners"].count(1) < 4
    assert any(note.startswith(membership.MIXED) for note in notes())
    assert last["message"] == "all ranks take equal shares of the micro-batches again"
    assert largest_difference(equal, shared) < TOLERANCE
    assert not audit(RUN).faults
