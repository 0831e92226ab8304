"""A program gives the same on any number of ranks, after a resume and with a newcomer,
and the same as plain torch.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import Optimizer

from hvd_train.errors import UsageError
from hvd_train.progress.order import EpochOrder
from hvd_train.tasks.task import Each, Mean, Total
from hvd_train.world.world import LocalWorld
from tests.support.elastic import TOLERANCE
from tests.support.programs import (
    DATA,
    INPUTS,
    Interrupted,
    Outcome,
    Program,
    check_same,
    check_survives,
    linear,
    losses,
    measure,
    momentum,
    plain,
    played,
    take,
)
from tests.support.runs import equal, small_config
from tests.support.worlds import own_generator, run_ranks


class Sharp(Optimizer):
    """Sharpness-aware steps in two updates (Foret et al., arXiv 2010.01412), over
    an optimizer with a state.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "climbs": True})
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        for p in group["params"]:
            if group["climbs"]:
                self.state[p]["by"] = 0.05 * p.grad / (p.grad.norm() + 1e-12)
                p.add_(self.state[p]["by"])
            else:
                p.sub_(self.state[p]["by"])
        if not group["climbs"]:
            self.base.step()
            self.zero_grad()
        group["climbs"] = not group["climbs"]


class Free(Optimizer):
    """Without a schedule (Defazio et al., arXiv 2405.15682): `eval` puts
    averages in place of the weights.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0, "trains": True})

    @torch.no_grad()
    def train(self, trains: bool = True) -> None:
        (group,) = self.param_groups
        for p in group["params"] if group["trains"] != trains else ():
            if "average" in self.state[p]:
                other = p.clone()
                p.copy_(self.state[p]["average"])
                self.state[p]["average"].copy_(other)
        group["trains"] = trains

    def eval(self) -> None:
        self.train(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        assert group["trains"]
        group["count"] += 1
        for p in group["params"]:
            p.sub_(p.grad, alpha=group["lr"])
            average = self.state[p].setdefault("average", p.clone())
            average.lerp_(p, 1 / group["count"])


class Outside(Optimizer):
    """An argument without a default, attributes outside of the groups, and no need of a
    learning rate.
    """

    def __init__(self, params: Any, power: float, **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.power = power
        self.noisy = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign() * p.grad.abs() ** self.power, alpha=0.1)
            if self.noisy:
                p.add_(torch.randn_like(p), alpha=0.01)


def hooked(model: nn.Module) -> Optimizer:
    """Return an optimizer whose hooks halve a gradient and pull the weights towards zero."""
    optimizer = momentum(model)
    optimizer.register_step_pre_hook(
        lambda o, *_: [p.grad.mul_(0.5) for p in o.param_groups[0]["params"]] and None
    )
    optimizer.register_step_post_hook(
        lambda o, *_: [p.data.mul_(0.99) for p in o.param_groups[0]["params"]] and None
    )
    return optimizer


def patched(model: nn.Module, rate: float = 0.1) -> Optimizer:
    """Return an optimizer with a method `step` of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    of_class = optimizer.step

    def step():
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        of_class()

    optimizer.step = step
    return optimizer


NO_DEFAULT = "an argument without a default"
# The others of torch keep state of the same kinds.
OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "fused SGD": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, fused=True
    ),
    "AMSGrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True, lr=0.01),
    NO_DEFAULT: lambda model: Outside(model.parameters(), 0.5, lr=0.1),
    "a learning rate of None": lambda model: Outside(model.parameters(), 1.0, lr=None),
    "no learning rate": lambda model: Outside(model.parameters(), 1.0),
    "hooks": hooked,
    "a step of its own": patched,
}


def check_as_plain_torch(
    program: Program,
    make: Callable[[], Any] = linear,
    optimizer_of: Callable[[Any], Any] = momentum,
    loss_of: Callable[[Any, Any], Tensor] = losses,
    before: Callable[[Any, int], object] = lambda model, step: None,
    plain_optimizer_of: Callable[[Any], Optimizer] | None = None,
) -> Outcome:
    """Assert that a program survives all, with the weights of a loop of plain torch on the
    same samples in the same order; return its outcome.

    `before` is called before each step of that loop.
    """
    found = check_survives(program, make=make, optimizer_of=optimizer_of)
    model = make()
    optimizer = (plain_optimizer_of or optimizer_of)(model)
    orders = [EpochOrder(small_config().seed, epoch, len(DATA))[:] for epoch in range(2)]
    for number, samples in enumerate(np.concatenate(orders).reshape(-1, 8), 1):
        before(model, number)
        optimizer.zero_grad()
        loss_of(model, DATA[samples]).mean().backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        assert float((found[0][name] - value).abs().max()) <= TOLERANCE
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_its_own_steps(name: str) -> None:
    check_as_plain_torch(plain, optimizer_of=OPTIMIZERS[name])


def test_an_optimizer_may_draw_random_numbers() -> None:
    """They depend on the step alone, whatever this rank has drawn before;
    attributes of the object hold.
    """

    def noisy(model):
        optimizer = OPTIMIZERS[NO_DEFAULT](model)
        optimizer.noisy = True
        return optimizer

    def drawing(session, model, optimizer, stop):
        for step in session.steps():
            torch.rand(step.number)
            take(step, model)

    expected = played(LocalWorld(), plain, Path("plain"), optimizer_of=noisy)[0]
    found = played(LocalWorld(), drawing, Path("drawing"), optimizer_of=noisy)[0]
    quiet = played(LocalWorld(), plain, Path("quiet"), optimizer_of=OPTIMIZERS[NO_DEFAULT])[0]
    assert equal(found, expected)
    assert not equal(quiet, expected)


def test_code_may_change_the_gradients_of_all_ranks() -> None:
    def program(session, model, optimizer, stop):
        session.before_update(lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01))
        plain(session, model, optimizer, stop)

    check_as_plain_torch(
        program,
        optimizer_of=OPTIMIZERS["SGD"],
        plain_optimizer_of=lambda model: patched(model, 0.01),
    )


def test_code_before_steps_may_change_weights_and_rates() -> None:
    """A resumed program runs this code again, and then has the weights of its point."""

    def program(session, model, optimizer, stop):
        peak = 0.1 * session.global_batch / 8  # the ranks have met here
        optimizer.param_groups[0]["lr"] = peak
        with torch.no_grad():
            nn.init.constant_(model.bias, 0.5)
        for epoch in session.epochs():
            optimizer.state.clear()
            optimizer.param_groups[0]["lr"] *= 0.5
            with torch.no_grad():
                model.weight.mul_(0.5)
            session.evaluate(DATA, measure, name="head")
            for step in epoch:
                take(step, model)
                stop(step.number)

    check_survives(program)


def test_code_of_a_step_may_draw_random_numbers() -> None:
    """They follow from the micro-batch and the step, also after a resume."""

    def draw():
        return torch.rand(()) + np.random.random() + random.random()

    def program(session, model, optimizer, stop):
        for step in session.steps():
            stop(step.number)
            for micro in step:
                micro.backward(draw() * losses(model, micro.batch))
            with torch.no_grad():
                model.bias.add_(0.01 * draw())

    whole = played(LocalWorld(), program, Path("whole"))
    with pytest.raises(Interrupted):
        played(LocalWorld(), program, stop_at=3)
    random.seed()
    np.random.seed()
    check_same(played(LocalWorld(), program), whole)


@pytest.mark.parametrize("way", ["leaves", "evaluates"])
def test_ranks_that_do_different_things_are_told_so(way: str) -> None:
    def program(session, model, optimizer, stop):
        for epoch in session.epochs():
            for step in epoch:
                take(step, model)
            if session.rank == 1:
                if way == "leaves":
                    break
                session.evaluate(DATA, measure)

    with pytest.raises(UsageError, match="the ranks do different things: rank 0 is at "):
        run_ranks(2, lambda world: played(world, program))


def test_one_backward_pass_can_serve_two_optimizers() -> None:
    def two(model):
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        return {"first": first, "last": torch.optim.Adam(model[2].parameters(), lr=0.01, eps=1e-3)}

    def program(session, model, optimizer, stop):
        for step in session.steps():
            stop(step.number)
            update = step.update("first", "last")
            for micro in update:
                micro.backward(losses(model, micro.batch), inputs=Each(micro.batch[0]))
            assert torch.equal(update.scores.each("inputs"), INPUTS[step.samples])

    def one_after_the_other(model):
        first, last = two(model).values()

        def step_too(*_):
            last.step()
            last.zero_grad()

        first.register_step_post_hook(step_too)
        return first

    check_as_plain_torch(program, two_layers, two, plain_optimizer_of=one_after_the_other)


def test_totals_and_values_of_a_step_are_those_of_all_samples() -> None:
    """So a queue and a centre that are registered are the same on any number of ranks."""

    def program(session, model, optimizer, stop):
        own = session.register(queue=torch.zeros(0, 8), centre=torch.zeros(3))
        for step in session.steps():
            for micro in step:
                inputs, targets = micro.batch
                outputs = model(inputs) - own.centre
                loss = F.cross_entropy(outputs, targets, reduction="none")
                micro.backward(loss, keys=Each(inputs), centre=Total(outputs.sum(0)))
            assert torch.equal(step.scores.each("keys"), INPUTS[step.samples])
            own.queue = torch.cat([own.queue, step.scores.each("keys")])[-12:]
            own.centre = 0.9 * own.centre + 0.1 * step.scores.total("centre").float() / step.size
            stop(step.number)

    check_survives(program)


def two_layers() -> nn.Module:
    return own_generator(nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)))


def of_last(model: Any) -> Optimizer:
    model[0].requires_grad_(False)
    return torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("at_step", [4, 7])
def test_parameters_may_be_added_at_any_step(at_step: int) -> None:
    """A resumed job and a newcomer have them, whether their own code adds them again or not."""

    def program(session, model, optimizer, stop):
        before = model[0].weight.clone()
        for step in session.steps():
            if step.number == at_step:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
            take(step, model)
            stop(step.number)
        assert not torch.equal(before, model[0].weight)

    check_survives(program, make=two_layers, optimizer_of=of_last)


def with_act(act: Callable[[Any, int], None]) -> Program:
    """Return a program that does this with its model before each step."""

    def program(session, model, optimizer, stop):
        for step in session.steps():
            act(model, step.number)
            take(step, model)
            stop(step.number)

    return program


@pytest.mark.parametrize(("at_step", "trains"), [(3, False), (6, True)])
def test_parameters_may_be_frozen_and_thawed_at_any_step(at_step: int, trains: bool) -> None:
    """Weight decay and momentum leave a frozen one alone."""

    def act(model, step):
        if step == at_step:
            model[0].requires_grad_(trains)

    def begun():
        model = two_layers()
        model[0].requires_grad_(not trains)
        return model

    def decaying(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    check_as_plain_torch(with_act(act), begun, decaying, before=act)


def test_a_layer_may_be_set_to_evaluation_mode_at_any_step() -> None:
    """A resumed job and a newcomer have its mode, though their code does not come there again."""

    def act(model, step):
        if step in (2, 5):
            model[1].train(step == 5)

    check_survives(with_act(act), make=lambda: nn.Sequential(linear(), nn.BatchNorm1d(3)))


def test_ranks_that_train_different_parameters_end_with_one_line() -> None:
    def program(session, model, optimizer, stop):
        for step in session.steps():
            model[0].requires_grad_(step.number < 3 or session.rank == 0)
            take(step, model)

    def body(world):
        with pytest.raises(UsageError, match="step 3: ranks train different parameters"):
            played(world, program, make=two_layers)

    run_ranks(2, body)


class Heads(nn.Module):
    """Samples of class 0 use one head, the others another; a third one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.body(batch[0]).tanh()
        losses = torch.zeros(len(hidden))
        for number, rows in enumerate((batch[1] == 0, batch[1] != 0)):
            if rows.any():
                losses[rows] = F.cross_entropy(
                    self.heads[number](hidden[rows]), batch[1][rows], reduction="none"
                )
        return losses


def test_a_parameter_that_no_sample_uses_stays_as_it_is() -> None:
    """Weight decay and Adam leave it alone, as in plain torch, though each rank uses others."""

    def program(session, model, optimizer, stop):
        for step in session.steps():
            for micro in step:
                micro.backward(model.loss(micro.batch))
            stop(step.number)

    def adam(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5, eps=1e-3)

    def make():
        return own_generator(Heads())

    weights, _, _ = check_as_plain_torch(program, make, adam, Heads.loss)
    assert torch.equal(weights["heads.2.weight"], make().heads[2].weight)


def test_terms_of_a_loss_have_counts_of_their_own() -> None:
    """Each term is divided by its own count over all ranks, and left out if it
    counts nothing in a step.
    """

    def terms_of(model, batch):
        of_samples = losses(model, batch)
        is_rare = (batch[1] == 2) & (batch[0].sum(1) > 0)
        is_even = batch[1] != 1
        squares = model(batch[0])[is_even].square().sum()
        rare = Mean((of_samples * is_rare).sum(), is_rare.sum())
        return of_samples, rare, Mean(squares, is_even.sum())

    def program(session, model, optimizer, stop):
        own = session.register(losses=())
        for step in session.steps():
            for micro in step:
                of_samples, rare, even = terms_of(model, micro.batch)
                micro.backward(of_samples + rare + even)
            own.losses += (step.scores["loss"],)
            stop(step.number)

    expected = []

    def loss_of(model, batch):
        of_samples, rare, even = terms_of(model, batch)
        count = torch.as_tensor(rare.count).clamp(min=1)
        loss = of_samples.mean() + rare.total / count + even.total / even.count
        expected.append(loss.item())
        return loss

    _, own, _ = check_as_plain_torch(program, loss_of=loss_of)
    torch.testing.assert_close(own["losses"], tuple(expected), rtol=0, atol=TOLERANCE)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    model[2].weight = model[0].weight
    return own_generator(model)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 3, dtype=torch.complex64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.line(inputs.to(torch.complex64)).abs()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8, sparse=True)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.words((inputs * 2 + 2).long()).mean(1))


MODELS = {
    "tied parameters": tied,
    "complex parameters": lambda: own_generator(Complex()),
    "a sparse embedding": lambda: own_generator(Words()),
    "weight norm": lambda: own_generator(parametrizations.weight_norm(nn.Linear(8, 3))),
    "orthogonal weights": lambda: nn.Sequential(
        parametrizations.orthogonal(own_generator(nn.Linear(8, 8))), linear()
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_odd_models_train_as_with_plain_torch(name: str) -> None:
    check_as_plain_torch(
        plain, MODELS[name], lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    )


def test_sharpness_aware_steps_are_two_updates() -> None:
    """An optimizer inside of an optimizer keeps its state."""

    def program(session, model, optimizer, stop):
        for step in session.steps():
            for _ in range(2):
                take(step.update("sharp"), model)
            stop(step.number)

    check_survives(program, optimizer_of=lambda model: {"sharp": Sharp(model.parameters())})


def test_an_optimizer_without_a_schedule_evaluates_its_averages() -> None:
    def program(session, model, optimizer, stop):
        for epoch in session.epochs():
            for step in epoch:
                take(step, model)
                stop(step.number)
            optimizer.eval()
            session.keep_best(session.evaluate(DATA, measure)["loss"], higher=False)
            optimizer.train()

    check_survives(program, optimizer_of=lambda model: Free(model.parameters()))
