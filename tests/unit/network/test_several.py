"""Several optimizers as one: what survives, and what a broken step puts back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hvd_train.errors import UsageError
from hvd_train.network.several import Copy, Several, by_name, without_gradients
from hvd_train.state import to_host


def model() -> nn.ModuleDict:
    """Two networks, one of them with running statistics."""
    return nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))})


def several(models: nn.ModuleDict) -> Several:
    """An optimizer for each network."""
    of_a = torch.optim.SGD(models["a"].parameters(), lr=0.1, momentum=0.9)
    return Several({"a": of_a, "b": torch.optim.Adam(models["b"].parameters(), lr=0.01)})


def step(models: nn.ModuleDict, optimizer: Optimizer) -> None:
    """One step with gradients of ones."""
    for parameter in models.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_the_state_of_all_is_one_that_can_be_loaded() -> None:
    """By others of the same kinds: they go on with the same updates, and their groups have the learning rates."""
    models, others = model(), model()
    mine, theirs = several(models), several(others)
    for optimizer in mine.named.values():
        step(models, optimizer)
    mine.param_groups[1]["lr"] = 0.05
    others.load_state_dict(models.state_dict())
    theirs.load_state_dict(copy.deepcopy(mine.state_dict()))  # it keeps the tensors that it is given
    assert [group["lr"] for group in theirs.param_groups] == [0.1, 0.05]
    for name in ("a", "b"):
        step(models, mine.named[name])
        step(others, theirs.named[name])
    for parameter, other in zip(models.parameters(), others.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_single_one_has_the_empty_name() -> None:
    """Whoever takes turns need not ask how many there are."""
    models = model()
    one = several(models)
    assert [*by_name(one)] == ["a", "b"]
    assert by_name(one.named["a"]) == {"": one.named["a"]}


def test_none_of_them_steps_for_all() -> None:
    """An update of all at once would be none of a turn."""
    with pytest.raises(TypeError, match="takes its own steps"):
        several(model()).step()


def test_a_parameter_belongs_to_one_of_them() -> None:
    """The error names the optimizers."""
    models = model()
    with pytest.raises(UsageError, match="the optimizers x, y share parameters"):
        Several({name: torch.optim.SGD(models["a"].parameters(), lr=0.1) for name in ("x", "y")})


@pytest.mark.parametrize("before", [0, 1])
def test_a_copy_brings_all_back(before: int) -> None:
    """Weights, moments, whether there are some yet or not, and buffers, even those that were replaced."""
    models = model()
    optimizer = several(models)
    for _ in range(before):
        step(models, optimizer.named["b"])
    weights, state = to_host(models.state_dict()), to_host(optimizer.state_dict())
    before_step = Copy([optimizer.named["b"]], models)
    step(models, optimizer.named["b"])
    models["b"][1].running_mean = torch.ones(2)
    before_step.put_back()
    assert all(torch.equal(weights[name], value) for name, value in models.state_dict().items())
    found = optimizer.state_dict()["state"]
    assert found.keys() == state["state"].keys()
    for number, known in found.items():
        assert all(torch.equal(known[name], state["state"][number][name]) for name in known)


def test_only_the_parameters_that_were_trained_are_again() -> None:
    """One that the user has frozen stays frozen."""
    models = model()
    models["a"].bias.requires_grad_(False)
    with without_gradients([*models["a"].parameters()]):
        assert not models["a"].weight.requires_grad
    assert [parameter.requires_grad for parameter in models["a"].parameters()] == [True, False]
