"""State of the user's objects: it survives as it is, on any number of ranks, after a
resume and in a newcomer.
"""

from collections import Counter, deque
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from hvd_train.checkpoint import committed
from hvd_train.errors import UsageError
from hvd_train.session import Session
from hvd_train.tasks.task import Each, Measure, Total
from hvd_train.world.world import LocalWorld
from tests.support.launching import notes
from tests.support.programs import (
    DATA,
    INPUTS,
    STEPS,
    Interrupted,
    Program,
    Stop,
    check_survives,
    linear,
    plain,
    played,
    take,
    with_a_newcomer,
)
from tests.support.runs import RUN, equal
from tests.support.worlds import run_ranks

SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "CyclicLR of a function": lambda o: schedulers.CyclicLR(
        o, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x
    ),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, threshold=1.0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.MultiStepLR(o, [1, 3])],
        [4],
    ),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=4),
}


def scheduled(make: Callable[[Optimizer], Any], *, is_registered: bool = True) -> Program:
    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        scheduler = make(optimizer)
        if is_registered:
            session.register(scheduler=scheduler)
        for step in session.steps():
            take(step, model)
            if isinstance(scheduler, schedulers.ReduceLROnPlateau):
                scheduler.step(step.scores["loss"])
            elif hasattr(scheduler, "step_update"):
                scheduler.step(step.number)
            else:
                scheduler.step()
            stop(step.number)

    return program


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_schedulers_of_torch_survive(name: str) -> None:
    """Those that keep more than a count: functions, objects, other
    schedulers, measures, momentum.
    """
    check_survives(scheduled(SCHEDULERS[name]))


def test_a_scheduler_of_timm_survives() -> None:
    """All do but PlateauLRScheduler, whose state_dict leaves out its counters."""
    kind = pytest.importorskip("timm.scheduler").CosineLRScheduler
    check_survives(scheduled(lambda o: kind(o, t_initial=20, warmup_t=3, noise_range_t=(2, 8))))


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_scheduler_that_is_not_registered_is_noted_once(is_registered: bool) -> None:
    played(LocalWorld(), scheduled(SCHEDULERS["LambdaLR"], is_registered=is_registered))
    found = [note for note in notes() if "session.register(scheduler=scheduler)" in note]
    assert len(found) == (not is_registered)


def test_a_scheduler_that_is_made_after_an_evaluation_survives() -> None:
    """Its constructor sets the rate of the first step again."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        session.evaluate(DATA, measure, name="first")
        scheduled(SCHEDULERS["LambdaLR"])(session, model, optimizer, stop)

    check_survives(program)


class Phase(IntEnum):
    FIRST = 1
    SECOND = 2


class Mean(NamedTuple):
    value: Any
    history: Any


class Meter(SimpleNamespace):
    """Has a state_dict of what people keep."""

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_values_of_numpy_and_of_other_classes_survive() -> None:
    """As they are: products of float32 round in another way than Python's."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        (group,) = optimizer.param_groups
        group.update(lr=np.float32(0.01), betas=(np.float32(0.8), np.float64(0.99)))
        own = session.register(
            level=np.float32(0.1),
            phase=Phase.FIRST,
            mean=Mean(np.float32(0), [np.float16(1)]),
            meter=Meter(sums=np.zeros(3, np.float32), window=deque(maxlen=3), counts=Counter()),
        )
        for step in session.steps():
            take(step, model)
            group["lr"] *= 0.9
            assert own.phase is Phase.FIRST or step.number > 4
            own.phase = Phase.SECOND if step.number > 3 else own.phase
            own.level = own.level * 0.9 + np.float32(step.number)
            own.mean = Mean(
                own.mean.value + own.level / 7, [own.mean.history[0] * np.float16(1.01)]
            )
            own.meter.sums[step.number % 3] += 0.1 * step.number
            own.meter.window.append(np.float32(0.1 * step.number))
            own.meter.counts[step.number % 3] += 1
            session.log(loss=np.float32(step.scores["loss"]), level=torch.tensor(1.0))
            stop(step.number)

    check_survives(
        program, optimizer_of=lambda model: torch.optim.Adam(model.parameters(), foreach=False)
    )


def test_a_rate_that_is_a_tensor_stays_the_users() -> None:
    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        rate = optimizer.param_groups[0]["lr"]
        for step in session.steps():
            rate.mul_(0.9)
            assert optimizer.param_groups[0]["lr"] is rate
            take(step, model)
            stop(step.number)

    check_survives(
        program,
        optimizer_of=lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
    )


class Master(torch.optim.Optimizer):
    """Keeps a copy of the weights in float32, and other things that torch's
    load_state_dict would change.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"kind": "master"})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(
                    master=parameter.float().clone(),
                    row=torch.zeros(2, dtype=torch.float64),
                    step=torch.tensor(0),
                    past=deque(maxlen=2),
                    nested={"a": [torch.ones(2)]},
                    sums=np.zeros(2),
                    name="w",
                )
            state["master"].add_(parameter.grad.float(), alpha=-0.01)
            parameter.copy_(state["master"])
            state["step"] += 1
            state["row"] += 0.1
            state["past"].append(state["row"].sum().item())
            state["nested"]["a"][0] *= 1.1
            state["sums"] += state["past"][-1]


def test_the_state_of_an_optimizer_keeps_its_types() -> None:
    """Weights are bfloat16; a registered one trains a network of the program's own."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        other = linear().bfloat16()
        aside = Master(other.parameters())
        session.register(other=other, aside=aside)
        for step in session.steps():
            for micro in step:
                inputs, targets = micro.batch
                outputs = model(inputs.bfloat16()).float()
                micro.backward(F.cross_entropy(outputs, targets, reduction="none"))
            other(torch.full((2, 8), 1.0 * step.number).bfloat16()).square().sum().backward()
            aside.step()
            aside.zero_grad()
            stop(step.number)

    check_survives(
        program,
        make=lambda: linear().bfloat16(),
        optimizer_of=lambda model: Master(model.parameters()),
    )


def test_values_are_compared_and_not_their_texts() -> None:
    """Dicts and sets may have another order on another rank, and numbers another type."""

    def program(session: Session, *given: Any) -> None:
        names = "abc"[:: -1 if session.rank else 1]
        last = 0 if session.rank else 0.0
        session.register(counts=Counter(names), seen={*names}, last=last)
        plain(session, *given)

    run_ranks(2, lambda world: played(world, program))


ODD = SimpleNamespace(state_dict=lambda: {"path": [Path()]}, load_state_dict=None)


@pytest.mark.parametrize(
    ("register", "act", "says"),
    [
        (
            {"x": ODD},
            None,
            r"^register\(x=...\).state_dict\(\)\['path'\]\[0\]: PosixPath cannot be kept: register",
        ),
        (
            {"x": 1},
            lambda s, own, o: setattr(own, "x", {"a": np.array([None])}),
            r"register\(x=...\)\['a'\]: ndarray",
        ),
        (
            {},
            lambda s, own, o: o.param_groups[0].update(lr=Path()),
            r"^optimizer.param_groups\[0\]\['lr'\]: PosixPath",
        ),
        (
            {},
            lambda s, own, o: next(iter(o.state.values())).update(x=Path()),
            r"^optimizer.state_dict\(\)\['state'\]",
        ),
        (
            {},
            lambda s, own, o: s.log(x=None),
            r"^session.log\(x=...\) is NoneType: it must be one number",
        ),
        (
            {},
            lambda s, own, o: s.keep_best(np.zeros(2)),
            r"^session.keep_best\(...\) is ndarray of shape \[2\]",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_at_once(
    register: dict[str, Any], act: Any, says: str
) -> None:
    """By its name, on all ranks, and not by the resumed job."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        own = session.register(**register)
        for step in session.steps():
            take(step, model)
            act(session, own, optimizer)

    with pytest.raises(UsageError, match=says):
        run_ranks(2, lambda world: played(world, program))


def measure(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Measure]:
    """Measure no figure, but values of which the program computes one itself."""
    inputs, _ = batch
    wide = model(inputs).repeat(1, 1000)
    return {"inputs": Each(inputs), "wide": Each(wide), "sum": Total(inputs.sum())}


def test_values_of_each_sample_are_in_no_checkpoint() -> None:
    """A newcomer gets them; a program that asks for those before its resume is told."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        before = session.evaluate(DATA, measure, name="first")
        if asks:
            assert before.each("wide").shape == (40, 3000)
        for epoch in session.epochs():
            session.evaluate(DATA, measure, name="head")
            for step in epoch:
                take(step, model)
                stop(step.number)
            scores = session.evaluate(DATA, measure)
            assert torch.equal(scores.each("inputs"), INPUTS)
            torch.testing.assert_close(scores.total("sum").float(), INPUTS.sum())
            session.keep_best(scores.each("wide").numpy().std())

    asks = False
    check_survives(program)
    asks = True
    with pytest.raises(Interrupted):
        played(LocalWorld(), program, stop_at=7)
    assert max(path.stat().st_size for path in committed(RUN)) < 150_000
    with pytest.raises(
        UsageError, match=r"^scores.each\('wide'\): this evaluation was before the job resumed"
    ):
        played(LocalWorld(), program)
    one, other = with_a_newcomer(lambda world: played(world, program, Path("newcomer")))
    assert equal(one[0], other[0])


def test_a_finished_training_evaluates_again_for_values_of_each_sample() -> None:
    """The code after its last step runs again, as for a fold whose program
    is stopped in a later one.
    """

    def program(session: Session, model: nn.Module, *_: Any) -> None:
        for epoch in session.epochs():
            for step in epoch:
                take(step, model)
            scores = session.evaluate(DATA, measure)
            widths.append(scores.each("wide").std())

    widths = []
    for _ in range(2):
        played(LocalWorld(), program, name="fold")
    assert len(widths) == 3
    assert torch.equal(widths[1], widths[2])


def test_a_queue_may_be_a_buffer_of_the_model() -> None:
    """A job that ends after the queue has changed resumes before that step."""

    def program(session: Session, model: Any, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            take(step, model)
            model.queue = torch.cat([model.queue, model.weight.detach()[:1]])[-4:]
            with session.aside():
                model.queue = None
            stop(step.number)

    def with_queue() -> nn.Module:
        model = linear()
        model.register_buffer("queue", torch.zeros(0, 8))
        return model

    check_survives(program, make=with_queue)
