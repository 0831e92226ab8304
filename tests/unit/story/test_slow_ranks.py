"""A slow rank has a name: ranks as threads, whose time passes by their work and their waits."""

import shutil
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
from tests.support.programs import Outcome, Stop, played
from tests.support.runs import RUN, largest_difference
from tests.support.worlds import ThreadWorld, own_generator, run_ranks


class Clock(threading.local):
    """The clock of this thread's rank."""

    time = 0.0


CLOCK = Clock()


def now() -> float:
    return CLOCK.time


SLOW_UNTIL = 20  # step


class TimedWorld(ThreadWorld):
    """A rank waits for the latest one."""

    begun: ClassVar[dict[Any, list[float]]] = defaultdict(list)

    @override
    def _give(self, name: str, value: Any) -> tuple[str, int]:
        self.begun[name, self._turns[name]].append(CLOCK.time)
        return super()._give(name, value)

    def _wait(self, name: str) -> None:
        CLOCK.time = max(CLOCK.time, *self.begun[name, self._turns[name] - 1])

    @override
    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        wait = super().start_sum(tensor, name)

        def timed() -> Tensor:
            total = wait()
            self._wait(f"sum {name}")
            return total

        return timed


class Data:
    """Samples that take time on a slow rank."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        self._work("data")
        return torch.cos(torch.arange(8.0) + number), number % 3


class Network(nn.Module):
    """A network that takes time for its passes."""

    def __init__(self, work: Any, norm: nn.Module) -> None:
        super().__init__()
        self.work = work
        self.first = nn.Linear(8, 8)
        self.norm = norm
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.work("forward")
        hidden = self.norm(self.first(inputs))
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.work("backward"))
        outputs: Tensor = self.last(hidden)
        return outputs


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainings read the clock of their rank."""

    def clock(commit_seconds: float | None, split: Split) -> TrainingClock:
        return TrainingClock(commit_seconds, Split(now), now)

    monkeypatch.setattr(membership, "TrainingClock", clock)


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

    def train(world: ThreadWorld) -> None:
        step_number = 0

        def work(at: str) -> None:
            is_slow = world.place.rank == 1 and at == place and step_number < SLOW_UNTIL
            CLOCK.time += 0.3 + 3 * is_slow

        def program(session: Session, model: Any, optimizer: Any, stop: Stop) -> None:
            nonlocal step_number
            for step in session.steps():
                step_number = step.number
                for micro in step:
                    inputs, targets = micro.batch
                    micro.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
                    work("after a pass")

        played(
            world,
            program,
            make=lambda: own_generator(Network(work, nn.BatchNorm1d(8))),
            data=Data(work),
            epochs=25,
            global_batch_size=12,
            batch_size=4,
            sync_batch_norm=sync_batch_norm,
        )

    TimedWorld.begun.clear()
    run_ranks(3, train, kind=TimedWorld)
    events = [event for event in records("event") if event["name"] in ("slow", "recovered")]
    assert [(event["name"], event["rank"]) for event in events] == [("slow", 1), ("recovered", 1)]
    assert events[0]["phase"] == phase
    assert events[0]["factor"] > 1.2
    assert f"rank 1 on {events[0]['host']} is " in events[0]["message"]
    assert any(step["ranks"] for step in records("step"))
    assert "work in a step: slowest " in facts(read(Path(RUN)))["workers"]


def test_a_slow_rank_takes_fewer_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have different processors. The weights are the same as with equal ones, each sample
    counts once, and shares go back after 40 steps.
    """

    def train(world: ThreadWorld) -> Outcome:
        step_number = 0

        def work(at: str) -> None:
            is_slow = world.place.rank == 1 and at == "forward" and step_number < 40
            CLOCK.time += 0.3 + 3 * is_slow

        def program(session: Session, model: Any, optimizer: Any, stop: Stop) -> None:
            nonlocal step_number
            for step in session.steps():
                step_number = step.number
                for micro in step:
                    inputs, targets = micro.batch
                    micro.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
            session.evaluate(Data(work), lambda model, batch: {"loss": model(batch[0])[:, 0]})

        return played(
            world,
            program,
            make=lambda: own_generator(Network(work, nn.Identity())),
            data=Data(work),
            epochs=60,
            global_batch_size=24,
            batch_size=2,
            ledger=True,
        )

    equal = run_ranks(3, train, kind=TimedWorld)[0]
    assert not any(event["name"] == "shares" for event in records("event"))
    shutil.rmtree(RUN)
    monkeypatch.setattr(membership, "processor", lambda: f"of rank {threading.get_ident()}")
    shared = run_ranks(3, train, kind=TimedWorld)[0]
    first, *_, last = [event for event in records("event") if event["name"] == "shares"]
    assert first["owners"].count(1) < 4
    assert any(note.startswith(membership.MIXED) for note in notes())
    assert last["message"] == "all ranks take equal shares of the micro-batches again"
    assert largest_difference(equal[0], shared[0]) < TOLERANCE
    assert not audit(Path(RUN)).faults
