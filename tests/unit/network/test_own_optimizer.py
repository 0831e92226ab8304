"""Optimizers that are named by class or function: how they are made, and which cannot serve."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hvd_train.errors import UsageError
from hvd_train.network import optim
from hvd_train.settings.optimizer import OptimizerConfig
from tests.support import runs
from tests.support.own_optimizers import HERE, Signs
from tests.support.worlds import own_generator


def settings(name: str, *arguments: str, **more: Any) -> OptimizerConfig:
    return OptimizerConfig(optimizer=name, optimizer_args=arguments, **{"learning_rate": 0.01, **more})


def stepped(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """The weights after three steps on one batch."""
    images, labels = torch.cos(torch.arange(8 * 64.0).view(8, 1, 8, 8)), torch.arange(8)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "cls", "arguments", "values"),
    [
        ("torch.optim:RMSprop", torch.optim.RMSprop, ("alpha=0.9", "momentum=0.5"), {"alpha": 0.9, "momentum": 0.5}),
        ("torch.optim:NAdam", torch.optim.NAdam, (), {}),
        ("adamw", torch.optim.AdamW, ("betas=[0.8, 0.95]", "eps=1e-6"), {"betas": (0.8, 0.95), "eps": 1e-6}),
        ("adam", torch.optim.Adam, ("amsgrad=true",), {"amsgrad": True}),
        ("sgd", torch.optim.SGD, ("dampening=0.5",), {"dampening": 0.5, "momentum": 0.9}),
        (f"{HERE}:Signs", Signs, ("beta=0.9", "power=0.5"), {"beta": 0.9, "power": 0.5}),
    ],
)
def test_a_class_takes_the_steps_that_it_takes_anywhere(
    name: str, cls: Any, arguments: tuple[str, ...], values: dict[str, Any]
) -> None:
    """With the learning rate, the weight decay and what is typed beside."""
    ours, theirs = own_generator(runs.convnet(10)), own_generator(runs.convnet(10))
    mine = optim.build(settings(name, *arguments, weight_decay=0.1), ours)
    assert isinstance(mine, cls)
    other = cls(theirs.parameters(), lr=0.01, weight_decay=0.1, **values)
    for one, two in zip(stepped(ours, mine), stepped(theirs, other), strict=True):
        torch.testing.assert_close(one, two)


def test_a_class_is_given_the_groups_that_decay_and_those_that_do_not() -> None:
    """`--decay-of weights` holds for any class that has a weight decay, and only what is trained is given."""
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[2].bias.requires_grad_(False)
    built = optim.build(settings("torch.optim:RMSprop", weight_decay=0.1, decay_of="weights"), model)
    assert [(group["weight_decay"], len(group["params"])) for group in built.param_groups] == [(0.1, 2), (0.0, 3)]


def test_a_functions_groups_keep_the_ratio_of_their_learning_rates() -> None:
    """What the schedule does to --learning-rate it does to each of them; the first one is that which is shown."""
    model = runs.convnet(10)
    built = optim.build(settings(f"{HERE}:by_layer", "head=10", learning_rate=0.1), model)
    assert optim.set_learning_rate(built, 0.05) == pytest.approx(0.05)
    assert [group["lr"] for group in built.param_groups] == pytest.approx([0.05, 0.5])
    own = optim.build(settings(f"{HERE}:own_rates", learning_rate=0.1), model)
    assert optim.set_learning_rate(own, 0.05) == pytest.approx(0.0005)
    assert [group["lr"] for group in own.param_groups] == pytest.approx([0.0005, 0.001, 0.0015, 0.002])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adam", ("beta=1",), "--optimizer-args beta: adam does not take it; it takes betas, eps, amsgrad"),
        ("sgd", ("momentum=0.5",), "--optimizer-args momentum: it has a flag of its own: type --momentum"),
        ("adam", ("betas=[2,3]",), "--optimizer-args betas=[2,3]: Invalid beta parameter"),
        ("torch.optim:RMSprop", ("lr=1",), "it has a flag of its own: type --learning-rate"),
        ("torch.optim:RMSprop", ("beta=1",), "torch.optim:RMSprop does not take it; it takes alpha, eps, momentum"),
        ("torch.optim:RMSprop", ("alpha=-1",), "it cannot be made: ValueError: Invalid alpha value"),
        ("torch.optim:RMSprob", (), "unknown function in torch.optim for --optimizer 'RMSprob'; did you mean"),
        ("torch.optim:Rprop", (), "knows no weight decay: type --weight-decay 0"),
        ("torch.optim:LBFGS", (), "its step needs a closure"),
        (f"{HERE}:network", (), "it is no torch.optim.Optimizer, and no function"),
        (f"{HERE}:Signs", (), "needs beta: type --optimizer-args beta=..."),
        (f"{HERE}:Forgets", (), "its steps depend on more than gradients and what is in its state_dict"),
        (f"{HERE}:Noisy", (), "its steps depend on more than gradients and what is in its state_dict"),
        (f"{HERE}:Fixed", (), "a group of parameters has no lr, which the schedule scales"),
        (f"{HERE}:Opaque", (), "its state holds a ReLU; a checkpoint holds Python's numbers, texts, tensors"),
        (f"{HERE}:OfNobody", (), "its state 'all' belongs to no parameter"),
    ],
)
def test_what_cannot_serve_is_told_before_there_is_a_model(name: str, arguments: tuple[str, ...], message: str) -> None:
    """One line with what it takes, or what to type."""
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        optim.check(settings(name, *arguments))
    assert "\n" not in str(caught.value)


def test_an_optimizer_of_sparse_gradients_alone_is_told() -> None:
    """In the words of its own step."""
    with pytest.raises(UsageError, match="its step fails: RuntimeError: SparseAdam does not support dense gradients"):
        optim.check(settings("torch.optim:SparseAdam", weight_decay=0.0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some", "it lacks 0.bias, 4.weight, 4.bias; it must have each parameter that it is given"),
        ("none", "it returned NoneType, not a torch.optim.Optimizer"),
        ("closure", "its step needs a closure"),
    ],
)
def test_a_function_is_tried_when_the_model_is_there(name: str, message: str) -> None:
    """What it forgets would be neither trained nor frozen."""
    config = settings(f"{HERE}:{name}", weight_decay=0.0)
    optim.check(config)
    with pytest.raises(UsageError, match=re.escape(message)):
        optim.build(config, runs.convnet(10))


def test_trying_an_optimizer_leaves_the_model_alone() -> None:
    """It steps on stand-ins, and so does another optimizer than the one that serves."""
    model = own_generator(runs.convnet(10))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    built = optim.build(settings(f"{HERE}:Signs", "beta=0.9"), model)
    assert all(map(torch.equal, before, model.parameters()))
    assert not built.state


def test_weights_are_shared_only_where_the_class_is_known_to_update_number_by_number() -> None:
    """What a user derives from Adam may look at whole weights; with dampening the first step is another one."""
    names = [("torch.optim:Adam", True), ("torch.optim:RMSprop", False), (f"{HERE}:Signs", False)]
    names += [(f"{HERE}:by_layer", True), (f"{HERE}:derived", False)]
    arguments = {f"{HERE}:Signs": ("beta=0.9",)}
    plain = [settings(name, *arguments.get(name, ()), weight_decay=0.0) for name, _ in names]
    built = [optim.build(config, runs.convnet(10)) for config in plain]
    assert [optim.is_elementwise(optimizer) for optimizer in built] == [shared for _, shared in names]
    assert not optim.is_elementwise(optim.build(settings("sgd", "dampening=0.5"), runs.convnet(10)))
