"""State of the user's objects: it survives as it is, on any number of ranks, after a
resume and in a newcomer.
"""

from collections import Counter, deque
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from hvd_train.checkpoint import committed, read
from hvd_train.errors import UsageError
from hvd_train.session import Session
from hvd_train.tasks.task import Each, Measure
from hvd_train.world.world import LocalWorld
from tests.support.launching import notes
from tests.support.programs import (
    DATA,
    STEPS,
    Interrupted,
    Program,
    Stop,
    check_survives,
    linear,
    losses,
    momentum,
    played,
    take,
    with_a_newcomer,
)
from tests.support.runs import equal, steps_on_disk
from tests.support.worlds import own_generator, run_ranks


class Warm:
    """A function of the step with a state of its own."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR of an object": lambda o: schedulers.LambdaLR(o, Warm(5)),
    "CyclicLR of a function": lambda o: schedulers.CyclicLR(
        o, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x
    ),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, threshold=1.0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o,
        [
            schedulers.ConstantLR(o, 0.1, 2),
            schedulers.MultiStepLR(o, [1, 3]),
            schedulers.ExponentialLR(o, 0.9),
        ],
        [3, 6],
    ),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=4),
}
OF_TIMM: dict[str, dict[str, Any]] = {
    "CosineLRScheduler": {"t_initial": 20, "warmup_t": 3, "noise_range_t": (2, 8)},
    "StepLRScheduler": {"decay_t": 2},
}


def scheduled(make: Callable[[Optimizer], Any]) -> Program:
    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        scheduler = make(optimizer)
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


@pytest.mark.parametrize("name", OF_TIMM)
def test_schedulers_of_timm_survive(name: str) -> None:
    """But its PlateauLRScheduler, whose state_dict leaves out its counters."""
    module = pytest.importorskip("timm.scheduler")
    check_survives(scheduled(lambda optimizer: getattr(module, name)(optimizer, **OF_TIMM[name])))


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_scheduler_that_is_not_registered_is_noted_once(is_registered: bool) -> None:
    def program(
        session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, stop: Stop
    ) -> None:
        scheduler = schedulers.ExponentialLR(optimizer, 0.9)
        if is_registered:
            session.register(scheduler=scheduler)
        for step in session.steps():
            take(step, model)
            scheduler.step()

    played(LocalWorld(), program, Path("run"))
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


class Meter:
    """Has a state_dict of what people keep."""

    def __init__(self) -> None:
        self.values = np.zeros(3, np.float32)
        self.window = deque[Any](maxlen=3)
        self.counts = Counter[int]()

    def add(self, number: int, loss: float) -> None:
        assert isinstance(self.values, np.ndarray)
        assert self.window.maxlen == 3
        self.values[number % 3] += loss
        self.window.append(np.float32(loss))
        self.counts[number % 3] += 1

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_values_of_numpy_and_of_other_classes_survive() -> None:
    """As they are: numbers of float32 round in another way than Python's."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        phase = Phase.FIRST
        mean = Mean(np.float32(0), [np.float16(1)])
        own = session.register(
            level=np.float32(0.1), lowest=np.inf, phase=phase, mean=mean, meter=Meter()
        )
        for step in session.steps():
            optimizer.param_groups[0]["lr"] = np.float32(
                0.05 * (1 + np.cos(np.pi * step.position / 4))
            )
            take(step, model)
            loss = step.scores["loss"]
            assert own.phase is Phase.FIRST or step.number > 4
            own.phase = Phase.SECOND if step.number > 3 else own.phase
            own.level = own.level * 0.9 + np.float32(step.number)
            own.lowest = np.minimum(own.lowest, own.level)
            own.mean = Mean(
                own.mean.value + own.level / 7, [own.mean.history[0] * np.float16(1.01)]
            )
            own.meter.add(step.number, 0.1 * step.number)
            session.log(loss=np.float32(loss), level=torch.tensor(1.0))
            stop(step.number)

    check_survives(program)


def test_a_rate_of_numpy_survives() -> None:
    """Its products and quotients round in another way than numbers of Python."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        optimizer.param_groups[0]["lr"] = np.float32(0.01)
        optimizer.param_groups[0]["betas"] = (np.float32(0.8), np.float64(0.99))
        for step in session.steps():
            take(step, model)
            optimizer.param_groups[0]["lr"] *= 0.9
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

    def optimizer_of(model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))

    check_survives(program, optimizer_of=optimizer_of)


class Master(torch.optim.Optimizer):
    """Keeps a copy of the weights in float32, and other things that torch's
    load_state_dict would change.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "kind": "master"})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(
                        master=parameter.float().clone(),
                        row=torch.zeros(2, dtype=torch.float64),
                        name="w",
                    )
                    state.update(
                        step=torch.tensor(0),
                        past=deque(maxlen=2),
                        sums=np.zeros(2),
                        nested={"a": [torch.ones(2)]},
                    )
                assert (state["name"], state["past"].maxlen) == ("w", 2)
                assert (state["master"].dtype, state["row"].dtype, state["step"].dtype) == (
                    torch.float32,
                    torch.float64,
                    torch.int64,
                )
                state["master"].add_(parameter.grad.float(), alpha=-group["lr"])
                parameter.copy_(state["master"])
                state["step"] += 1
                state["row"] += 0.1
                state["past"].append(state["row"].sum().item())
                state["sums"] += state["past"][-1]
                state["nested"]["a"][0] *= 1.1


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

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        names = ["a", "b", "c"][:: -1 if session.rank else 1]
        own = session.register(
            counts=Counter[str](), seen=set[str](), last=0 if session.rank else 0.0
        )
        for name in names:
            own.counts[name] = 1
            own.seen = {name, *own.seen}
        for step in session.steps():
            take(step, model)

    run_ranks(2, lambda world: played(world, program, Path("run")))


def one_step(register: dict[str, Any], act: Callable[..., object]) -> Program:
    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        own = session.register(**register)
        for step in session.steps():
            take(step, model)
            act(session, own, optimizer)

    return program


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"path": [Path()]}

    def load_state_dict(self, state: object) -> None:
        pass


@pytest.mark.parametrize(
    ("register", "act", "says"),
    [
        (
            {"x": Odd()},
            None,
            r"^register\(x=...\).state_dict\(\)\['path'\]\[0\]: PosixPath cannot be kept",
        ),
        (
            {"x": [schedulers.StepLR(momentum(linear()), 1)]},
            None,
            r"x=...\)\[0\]: StepLR .* each under its own name",
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
    with pytest.raises(UsageError, match=says):
        run_ranks(2, lambda world: played(world, one_step(register, act)))


def measure(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Measure]:
    inputs, targets = batch
    logits = model(inputs)
    wide = logits.repeat(1, 1000)
    return {"loss": F.cross_entropy(logits, targets, reduction="none"), "wide": Each(wide)}


def test_values_of_each_sample_are_in_no_checkpoint() -> None:
    """A newcomer gets them; a program that asks for those before its resume is told."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        before = session.evaluate(DATA, measure, name="first")
        if asks:
            assert before.each("wide").shape == (40, 3000)
        for epoch in session.epochs():
            head = session.evaluate(DATA, measure, name="head")
            assert len(head) == 1
            for step in epoch:
                take(step, model)
                stop(step.number)
            scores = session.evaluate(DATA, measure)
            session.keep_best(scores.each("wide").numpy().std())

    asks = False
    check_survives(program)
    folder = Path("asks")
    asks = True
    with pytest.raises(Interrupted):
        played(LocalWorld(), program, folder, stop_at=7)
    assert max(path.stat().st_size for path in committed(folder)) < 150_000
    assert all(
        isinstance(read(path)["best"]["figures"]["best"], float) for path in committed(folder)
    )
    with pytest.raises(
        UsageError, match=r"^scores.each\('wide'\): this evaluation was before the job resumed"
    ):
        played(LocalWorld(), program, folder)
    one, other = with_a_newcomer(lambda world: played(world, program, Path("newcomer")))
    assert equal(one[0], other[0])


def test_a_finished_training_evaluates_again_for_values_of_each_sample() -> None:
    """The code after its last step runs again, as for a fold whose program
    is stopped in a later one.
    """

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for epoch in session.epochs():
            for step in epoch:
                take(step, model)
            scores = session.evaluate(DATA, measure)
            widths.append(scores.each("wide").std())
        assert session._ranks.state.progress.step == 10

    widths = list[Tensor]()
    for _ in range(2):
        played(LocalWorld(), program, Path("program"), name="fold")
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


def test_a_step_that_an_error_ends_leaves_no_trace_in_buffers() -> None:
    """The commit is of the steps before, though a pass has moved the statistics of batch norm."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            for micro in step:
                loss = losses(model, micro.batch)
                stop(step.number)
                micro.backward(loss)

    make = lambda: own_generator(nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)))  # noqa: E731
    check_survives(program, make=make)
    with pytest.raises(Interrupted):
        played(LocalWorld(), program, make=make, stop_at=7)
    assert steps_on_disk() == [6]
