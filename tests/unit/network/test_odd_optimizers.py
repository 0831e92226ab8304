"""Optimizers that look as if they could serve: what is mended for them, and what is refused."""

from __future__ import annotations

import io
import re

import pytest
import torch
from torch import nn

from hvd_train.errors import UsageError
from hvd_train.network import optim
from hvd_train.settings.optimizer import OptimizerConfig
from tests.support import runs
from tests.support.odd_optimizers import HERE


def settings(name: str, weight_decay: float = 0.0) -> OptimizerConfig:
    return OptimizerConfig(optimizer=f"{HERE}:{name}", learning_rate=0.01, weight_decay=weight_decay)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Numpy", "its state holds a float64; a checkpoint holds Python's numbers, texts, tensors"),
        ("OwnRate", "its step does not go by the lr of its groups, which the schedule sets"),
        ("Stateless", "its state_dict fails: KeyError: 'state' ("),
        ("Wrapped", "its state_dict has inner; it must have state and param_groups"),
        ("Silent", "its state_dict has nothing; it must have state and param_groups"),
        ("Nameless", "its step fails: KeyError: 'x' ("),
    ],
)
def test_what_would_fail_later_is_told_at_once(name: str, message: str) -> None:
    """In one line, before there is a model."""
    with pytest.raises(UsageError, match=re.escape(f"--optimizer {HERE}:{name}: {message}")) as caught:
        optim.check(settings(name))
    assert "\n" not in str(caught.value)


def test_groups_that_change_places_are_told() -> None:
    """The state of one parameter would become that of another, on another rank or in the next run."""
    twins = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    with pytest.raises(UsageError, match="its steps depend on more than gradients"):
        optim.build(settings("groups_in_any_order"), twins)


def test_parameters_have_one_order_in_every_process() -> None:
    """That of the model, whatever order a function gives them, and their names with them."""
    model = runs.convnet(10)
    for _ in range(3):
        (group,) = optim.build(settings("in_any_order"), model).param_groups
        assert group["params"] == list(model.parameters())
        assert group["param_names"] == [name for name, _ in model.named_parameters()]


def test_learning_rates_of_numpy_become_numbers_that_a_checkpoint_holds() -> None:
    """Otherwise each checkpoint of the run would be refused when it is read."""
    built = optim.build(settings("numpy_rates"), runs.convnet(10))
    file = io.BytesIO()
    torch.save(built.state_dict(), file)
    file.seek(0)
    rates = [group["lr"] for group in torch.load(file, weights_only=True)["param_groups"]]
    assert (rates[0], rates[-1]) == pytest.approx((0.01, 0.02))


def test_what_takes_anything_is_given_the_learning_rate_and_the_weight_decay() -> None:
    """What it hands on decides whether it knows them."""
    for name in ("Rest", "of_any", "Frozen"):
        built = optim.build(settings(name, weight_decay=0.1), runs.convnet(10))
        assert [(group["lr"], group["weight_decay"]) for group in built.param_groups] == [(0.01, 0.1)]
    with pytest.raises(UsageError, match=r"it cannot be made: TypeError: .*weight_decay"):
        optim.build(OptimizerConfig(optimizer=f"{HERE}:RestOfPlain", weight_decay=0.1), runs.convnet(10))
    assert optim.build(OptimizerConfig(optimizer=f"{HERE}:RestOfPlain", weight_decay=0.0), runs.convnet(10))
