"""The optimizers: torch's own arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hvd_train.network import optim
from hvd_train.settings.optimizer import OptimizerConfig
from tests.support.runs import convnet
from tests.support.worlds import own_generator

PUBLISHED: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {"fused": True}),
    "adamw": (AdamW, {"fused": True}),
}


def stepped(model: nn.Module, optimizer: Optimizer, steps: int) -> list[torch.Tensor]:
    """The weights after so many steps on one batch."""
    images, labels = torch.cos(torch.arange(8 * 64.0).view(8, 1, 8, 8)), torch.arange(8)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_optimizer_is_torchs_to_the_last_bit(name: str) -> None:
    """Steps, state and restored state are those of the class that torch publishes."""
    config = OptimizerConfig(optimizer=name, learning_rate=0.01, weight_decay=0.1, nesterov=name == "sgd")  # type: ignore[arg-type]
    ours, theirs, restored = (own_generator(convnet(10)) for _ in range(3))
    mine = optim.build(config, ours)
    cls, more = PUBLISHED[name]
    other = cls(theirs.parameters(), lr=0.01, weight_decay=0.1, **more)  # type: ignore[call-arg]
    assert isinstance(mine, cls)
    assert all(map(torch.equal, stepped(ours, mine, 3), stepped(theirs, other, 3)))
    again = optim.build(config, restored)
    again.load_state_dict(other.state_dict())
    restored.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, stepped(ours, mine, 2), stepped(restored, again, 2)))


def test_hooks_on_a_step_are_called() -> None:
    """What watches optimizers by torch's hooks (profilers, users) sees these, too."""
    model = own_generator(convnet(10))
    optimizer = optim.build(OptimizerConfig(), model)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    stepped(model, optimizer, 1)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_that_lie_in_memory_with_gaps_or_are_complex(name: str) -> None:
    """A user's own may be a view of something else, or of complex numbers: they are trained as torch trains them."""

    def odd() -> nn.Module:
        model = nn.Module()
        model.view = nn.Parameter(torch.arange(24.0).view(4, 6)[:, ::2])
        model.waves = nn.Parameter(torch.polar(torch.ones(3), torch.arange(3.0)))
        return model

    def stepped(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            (model.view.pow(2) * torch.arange(12.0).view(4, 3)).sum().add(model.waves.abs().sum()).backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    cls, more = PUBLISHED[name]
    ours, theirs = odd(), odd()
    mine = optim.build(OptimizerConfig(optimizer=name, learning_rate=0.01, nesterov=name == "sgd"), ours)  # type: ignore[arg-type]
    default = OptimizerConfig()
    other = cls(theirs.parameters(), lr=0.01, weight_decay=default.weight_decay, **{**more, "fused": False})
    for one, two in zip(stepped(ours, mine), stepped(theirs, other), strict=True):
        torch.testing.assert_close(one, two)
