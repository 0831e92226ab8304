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

from hvd_train.errors import UsageError
from hvd_train.progress.order import EpochOrder
from hvd_train.session import Session
from hvd_train.tasks.task import Each, Mean, Total
from hvd_train.world.world import LocalWorld
from tests.support.elastic import TOLERANCE
from tests.support.programs import (
    DATA,
    INPUTS,
    Interrupted,
    Program,
    Stop,
    check_same,
    check_survives,
    linear,
    measure,
    momentum,
    played,
    take,
)
from tests.support.runs import equal, largest_difference, small_config
from tests.support.worlds import ThreadWorld, own_generator, run_ranks

Optimizer = torch.optim.Optimizer


def plain(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
    for step in session.steps():
        take(step, model)
        stop(step.number)


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware steps in two updates (Foret et al., arXiv 2010.01412), over
    an optimizer with a state.
    """

    def __init__(self, params: Any, base: type[Optimizer], rho: float, **settings: Any) -> None:
        super().__init__(params, {"rho": rho, "climbs": True, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for p in group["params"]:
            if group["climbs"]:
                self.state[p]["by"] = group["rho"] * p.grad / (p.grad.norm() + 1e-12)
                p.add_(self.state[p]["by"])
            else:
                p.sub_(self.state[p]["by"])
        if not group["climbs"]:
            self.base.step()
            self.zero_grad()
        group["climbs"] = not group["climbs"]


class Free(torch.optim.Optimizer):
    """Without a schedule (Defazio et al., arXiv 2405.15682): `eval` puts
    averages in place of the weights.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "trains": True})

    @torch.no_grad()
    def _swap(self, *, trains: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["trains"] != trains else ():
                if "average" in self.state[p]:
                    other = p.clone()
                    p.copy_(self.state[p]["average"])
                    self.state[p]["average"].copy_(other)
            group["trains"] = trains

    def eval(self) -> None:
        self._swap(trains=False)

    def train(self) -> None:
        self._swap(trains=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["trains"]
            group["count"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
                average = self.state[p].setdefault("average", p.clone())
                average.lerp_(p, 1 / group["count"])


class Outside(torch.optim.Optimizer):
    """An argument without a default, and attributes outside of the groups."""

    def __init__(self, params: Any, power: float) -> None:
        super().__init__(params, {"lr": 0.1})
        self.power = power
        self.noisy = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign() * p.grad.abs() ** self.power, alpha=0.1)
            if self.noisy:
                p.add_(torch.randn_like(p), alpha=0.01)


class Relative(torch.optim.Optimizer):
    """An optimizer with relative steps, whose learning rate is None or absent."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.01)


def hooked(model: nn.Module) -> Optimizer:
    """Return an optimizer whose hooks halve a gradient and pull the weights towards zero."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
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

    def step() -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        of_class()

    optimizer.step = step  # type: ignore[method-assign,assignment]
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    name: lambda model, kind=getattr(torch.optim, name): kind(model.parameters(), lr=0.01)  # noqa: B008
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "Adagrad",
        "Adadelta",
        "ASGD",
        "RMSprop",
        "Rprop",
    )
}
OPTIMIZERS |= {
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "Muon": lambda model: torch.optim.Muon([model.weight], lr=0.01),  # it takes matrices only
    "fused SGD": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, fused=True
    ),
    "capturable AMSGrad": lambda model: torch.optim.Adam(
        model.parameters(), amsgrad=True, foreach=True, lr=0.01
    ),
    "an argument without a default": lambda model: Outside(model.parameters(), 0.5),
    "a learning rate of None": lambda model: Relative(model.parameters(), lr=None),
    "no learning rate": lambda model: Relative(model.parameters()),
    "hooks": hooked,
    "a step of its own": patched,
}


def without_bias() -> nn.Module:
    return own_generator(nn.Linear(8, 3, bias=False))


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def by_hand(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[Any, Any], Tensor] = mean_loss,
    before: Callable[[int], object] = lambda step: None,
) -> None:
    """Train with plain torch on the same samples in the same order; `before`
    is called before each step.
    """
    orders = [EpochOrder(small_config().seed, epoch, len(DATA))[:] for epoch in range(2)]
    for number, samples in enumerate(np.concatenate(orders).reshape(-1, 8), 1):
        before(number)
        optimizer.zero_grad()
        loss_of(model, DATA[samples]).backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_its_own_steps(name: str) -> None:
    """The result is that of a plain loop with such an object."""
    make = without_bias if name == "Muon" else linear
    weights, _, _ = check_survives(plain, make=make, optimizer_of=OPTIMIZERS[name])
    model = make()
    by_hand(model, OPTIMIZERS[name](model))
    # Rprop looks at signs, and Adam and others divide by the gradient: rounding of a small one is a
    # large one.
    assert largest_difference(weights, model.state_dict()) <= (
        1e-3 if name == "Rprop" else TOLERANCE
    )


def test_an_optimizer_may_draw_random_numbers() -> None:
    """They depend on the step alone, whatever this rank has drawn before;
    attributes of the object hold.
    """

    def noisy(model: nn.Module) -> Optimizer:
        optimizer = Outside(model.parameters(), 0.5)
        optimizer.noisy = True
        return optimizer

    def drawing(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            torch.rand(step.number)
            for micro in step:
                torch.rand(micro.number)
                micro.backward(
                    F.cross_entropy(model(micro.batch[0]), micro.batch[1], reduction="none")
                )

    quiet, other = (
        played(LocalWorld(), program, Path(f"run-{number}"), optimizer_of=noisy)[0]
        for number, program in enumerate((plain, drawing))
    )
    assert equal(quiet, other)
    without = played(
        LocalWorld(),
        plain,
        Path("without"),
        optimizer_of=OPTIMIZERS["an argument without a default"],
    )[0]
    assert not equal(quiet, without)


def test_code_may_change_the_gradients_of_all_ranks() -> None:
    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        session.before_update(lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01))
        plain(session, model, optimizer, stop)

    weights, _, _ = check_survives(program, optimizer_of=OPTIMIZERS["SGD"])
    model = linear()
    by_hand(model, patched(model, 0.01))
    assert largest_difference(weights, model.state_dict()) <= TOLERANCE


def test_code_before_steps_may_change_weights() -> None:
    """A resumed program runs this code again, and then has the weights of its point."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        peak = 0.1 * session.global_batch / 8  # the ranks have met here
        optimizer.param_groups[0]["lr"] = peak
        with torch.no_grad():
            nn.init.constant_(model.get_parameter("bias"), 0.5)
        for epoch in session.epochs():
            optimizer.state.clear()
            optimizer.param_groups[0]["lr"] = peak / epoch.number
            with torch.no_grad():
                model.get_parameter("weight").mul_(0.5)
            session.evaluate(DATA, measure, name="head")
            for step in epoch:
                take(step, model)
                stop(step.number)

    check_survives(program)


@pytest.mark.parametrize("library", ["torch", "numpy", "random"])
def test_code_of_a_step_may_draw_random_numbers(library: str, tmp_path: Path) -> None:
    """They follow from the micro-batch and the step, also after a resume."""
    draws: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.rand(()),
        "numpy": np.random.random,
        "random": random.random,
    }
    draw = draws[library]

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            stop(step.number)
            for micro in step:
                inputs, targets = micro.batch
                outputs = model(inputs + draw())
                micro.backward(F.cross_entropy(outputs, targets, reduction="none"))
            with torch.no_grad():
                model.get_parameter("bias").add_(0.01 * draw())

    whole = played(LocalWorld(), program, tmp_path / "whole")
    with pytest.raises(Interrupted):
        played(LocalWorld(), program, tmp_path / "resumed", stop_at=3)
    random.seed()
    np.random.seed()
    check_same(played(LocalWorld(), program, tmp_path / "resumed"), whole)


def leaves_epochs(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
    for epoch in session.epochs():
        for step in epoch:
            take(step, model)
        if session.rank == 1:
            break


def evaluates_on_rank_0(
    session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop
) -> None:
    for epoch in session.epochs():
        for step in epoch:
            take(step, model)
        if session.rank == 0:
            session.evaluate(DATA, measure)


@pytest.mark.parametrize("program", [leaves_epochs, evaluates_on_rank_0])
def test_ranks_that_do_different_things_are_told_so(program: Program, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the ranks do different things: rank 0 is at "):
        run_ranks(2, lambda world: played(world, program, tmp_path))


def test_one_backward_pass_can_serve_two_optimizers() -> None:
    def two(model: Any) -> Any:
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        return {"first": first, "last": torch.optim.Adam(model[2].parameters(), lr=0.01, eps=1e-3)}

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            stop(step.number)
            update = step.update("first", "last")
            for micro in update:
                loss = F.cross_entropy(model(micro.batch[0]), micro.batch[1], reduction="none")
                micro.backward(loss, inputs=Each(micro.batch[0]))
            assert torch.equal(update.scores.each("inputs"), INPUTS[step.samples])

    weights, _, _ = check_survives(program, make=two_layers, optimizer_of=two)
    model = two_layers()
    both = two(model)
    both["first"].register_step_post_hook(lambda *_: both["last"].step())
    by_hand(model, both["first"], before=lambda step: both["last"].zero_grad())
    assert largest_difference(weights, model.state_dict()) <= TOLERANCE


def test_totals_and_values_of_a_step_are_those_of_all_samples() -> None:
    """So a queue and a centre that are registered are the same on any number of ranks."""

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
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


@pytest.mark.parametrize("at_step", [1, 4, 6, 7])
def test_parameters_may_be_added_at_any_step(at_step: int) -> None:
    """A resumed job and a newcomer have them, whether their own code adds them again or not."""

    def program(session: Session, model: Any, optimizer: Optimizer, stop: Stop) -> None:
        before = model[0].weight.clone()
        for step in session.steps():
            if step.number == at_step:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
            take(step, model)
            stop(step.number)
        assert not torch.equal(before, model[0].weight)

    check_survives(program, make=two_layers, optimizer_of=of_last)


@pytest.mark.parametrize("at_step", [3, 6])
@pytest.mark.parametrize("trains", [False, True])
def test_parameters_may_be_frozen_and_thawed_at_any_step(at_step: int, trains: bool) -> None:
    """Weight decay and momentum leave a frozen one alone."""

    def program(session: Session, model: Any, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            if step.number == at_step:
                model[0].requires_grad_(trains)
            take(step, model)
            stop(step.number)

    def begun() -> nn.Module:
        model: Any = two_layers()
        model[0].requires_grad_(not trains)
        return own_generator(model)

    def decaying(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    weights, _, _ = check_survives(program, make=begun, optimizer_of=decaying)
    model: Any = begun()
    by_hand(
        model,
        decaying(model),
        before=lambda step: step == at_step and model[0].requires_grad_(trains),
    )
    assert largest_difference(weights, model.state_dict()) <= TOLERANCE


def test_a_layer_may_be_set_to_evaluation_mode_at_any_step() -> None:
    """A resumed job and a newcomer have its mode, though their code does not come there again."""

    def program(session: Session, model: Any, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            if step.number in (2, 5):
                model[1].train(step.number == 5)
            take(step, model)
            stop(step.number)

    check_survives(
        program, make=lambda: own_generator(nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)))
    )


def test_ranks_that_train_different_parameters_end_with_one_line() -> None:
    def program(session: Session, model: Any, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            model[0].requires_grad_(step.number < 3 or session.rank == 0)
            take(step, model)

    errors = []

    def body(world: ThreadWorld) -> None:
        try:
            played(world, program, Path("differs"), two_layers)
        except UsageError as error:
            errors.append(str(error))

    run_ranks(2, body)
    assert len(errors) == 2
    assert all("step 3: ranks train different parameters" in error for error in errors)


class Heads(nn.Module):
    """Samples of class 0 use one head, the others another; a third one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)])

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

    def program(session: Session, model: Any, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            for micro in step:
                micro.backward(model.loss(micro.batch))
            stop(step.number)

    def adam(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5, eps=1e-3)

    make = lambda: own_generator(Heads())  # noqa: E731
    weights, _, _ = check_survives(program, make=make, optimizer_of=adam)
    model: Any = make()
    by_hand(model, adam(model), lambda model, batch: model.loss(batch).mean())
    assert largest_difference(weights, model.state_dict()) <= TOLERANCE
    assert torch.equal(weights["heads.2.weight"], make().state_dict()["heads.2.weight"])


@pytest.mark.parametrize("batch_size", [4, 8])
def test_terms_of_a_loss_have_counts_of_their_own(batch_size: int) -> None:
    """Each term is divided by its own count over all ranks, and left out if it
    counts nothing in a step.
    """

    def terms_of(
        model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        outputs = model(batch[0])
        losses = F.cross_entropy(outputs, batch[1], reduction="none")
        is_rare = (batch[1] == 2) & (batch[0].sum(1) > 0)
        is_even = batch[1] != 1
        return (
            (losses * is_rare).sum(),
            is_rare.sum(),
            outputs[is_even].square().sum(),
            is_even.sum(),
            losses,
        )

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        own = session.register(losses=())
        for step in session.steps():
            for micro in step:
                rare, num_rare, even, num_even, losses = terms_of(model, micro.batch)
                micro.backward(losses + Mean(rare, num_rare) + Mean(even, num_even))
            own.losses += (step.scores["loss"],)
            stop(step.number)

    expected = []

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rare, num_rare, even, num_even, losses = terms_of(model, batch)
        loss = rare / num_rare.clamp(min=1) + even / num_even + losses.mean()
        expected.append(loss.item())
        return loss

    weights, own, _ = check_survives(program, batch_size=batch_size)
    model = linear()
    by_hand(model, momentum(model), loss_of)
    assert largest_difference(weights, model.state_dict()) <= TOLERANCE
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
        outputs: Tensor = self.line(inputs.to(torch.complex64)).abs()
        return outputs


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8, sparse=True)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.words((inputs * 2 + 2).long()).mean(1))
        return outputs


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied parameters": tied,
    "complex parameters": lambda: own_generator(Complex()),
    "a sparse embedding": lambda: own_generator(Words()),
    "weight norm": lambda: own_generator(parametrizations.weight_norm(nn.Linear(8, 3))),
    "orthogonal weights": lambda: nn.Sequential(
        parametrizations.orthogonal(linear_of(8, 8)), linear_of(8, 3)
    ),
}


def linear_of(inputs: int, outputs: int) -> nn.Module:
    return own_generator(nn.Linear(inputs, outputs))


@pytest.mark.parametrize("name", MODELS)
def test_odd_models_train_as_with_plain_torch(name: str) -> None:
    def gradient_descent(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    weights, _, _ = check_survives(plain, make=MODELS[name], optimizer_of=gradient_descent)
    model = MODELS[name]()
    by_hand(model, gradient_descent(model))
    for key, value in model.state_dict().items():
        assert float((weights[key] - value).abs().max()) <= TOLERANCE


def test_sharpness_aware_steps_are_two_updates() -> None:
    """An optimizer inside of an optimizer keeps its state."""
    made = list[Optimizer]()

    def sharp(model: nn.Module) -> Any:
        made.append(Sharp(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9))
        return {"sharp": made[-1]}

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            for _ in range(2):
                for micro in step.update("sharp"):
                    inputs, targets = micro.batch
                    micro.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
            stop(step.number)

    check_survives(program, optimizer_of=sharp)


def test_an_optimizer_without_a_schedule_evaluates_its_averages() -> None:
    def program(session: Session, model: nn.Module, optimizer: Any, stop: Stop) -> None:
        for epoch in session.epochs():
            for step in epoch:
                take(step, model)
                stop(step.number)
            optimizer.eval()
            losses = session.evaluate(
                DATA, lambda m, b: {"loss": F.cross_entropy(m(b[0]), b[1], reduction="none")}
            )
            session.keep_best(losses["loss"], higher=False)
            optimizer.train()

    check_survives(program, optimizer_of=lambda model: Free(model.parameters(), lr=0.1))


def test_a_first_step_that_is_skipped_begins_no_momentum() -> None:
    """torch's fused optimizers begin it with uninitialised memory."""
    seen = []

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            for micro in step:
                loss = F.cross_entropy(model(micro.batch[0]), micro.batch[1], reduction="none")
                micro.backward(loss * float("nan") if step.number == 1 else loss)
            seen.append((step.skipped, len(optimizer.state)))

    def fused(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    played(LocalWorld(), program, Path("skips"), optimizer_of=fused)
    assert seen[:2] == [(True, 0), (False, 2)]
