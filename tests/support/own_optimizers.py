"""Optimizers as users write them: some that serve, and some that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

HERE = "tests.support.own_optimizers"
Named = Sequence[tuple[str, nn.Parameter]]


class Signs(Optimizer):
    """Steps by the sign of a momentum; it needs an argument, keeps an attribute, and counts in plain numbers."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float = 0.0, power: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.beta, self.power = beta, power

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move each weight, by less in each step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    momentum = state.setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - self.beta)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(torch.tanh(100 * momentum), alpha=-group["lr"] / state["count"] ** self.power)


def by_layer(named_parameters: Named, lr: float, head: float = 1.0, weight_decay: float = 0.0) -> Optimizer:
    """AdamW, with another learning rate for the last layer."""
    body, last = list(named_parameters)[:-2], list(named_parameters)[-2:]
    groups = [{"params": [p for _, p in body]}, {"params": [p for _, p in last], "lr": head * lr}]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)


def own_rates(named_parameters: Named, weight_decay: float = 0.0) -> Optimizer:
    """SGD with learning rates of its own."""
    groups = [{"params": [p], "lr": 0.001 * (1 + n)} for n, (_, p) in enumerate(named_parameters)]
    return torch.optim.SGD(groups, momentum=0.9, weight_decay=weight_decay)


class Forgets(Signs):
    """Counts its steps in an attribute, which no checkpoint has."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, 0.9, weight_decay)
        self.power = 0.0

    def step(self, closure: Any = None) -> None:
        """Move by less in each step."""
        self.power += 1.0
        super().step()


class Noisy(Forgets):
    """Adds noise, another one on each rank."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move by chance."""
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


class Fixed(Optimizer):
    """Keeps its learning rate to itself."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"weight_decay": weight_decay})
        self.rate = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move each weight."""
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-self.rate)


class Opaque(Forgets):
    """Keeps an object in its state."""

    def step(self, closure: Any = None) -> None:
        """Keep it."""
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = nn.ReLU()


class OfNobody(Forgets):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        """Keep it."""
        self.state["all"] = {"count": 1}  # type: ignore[index]


def some(named_parameters: Named) -> Optimizer:
    """SGD of the first parameter alone."""
    return torch.optim.SGD([named_parameters[0][1]], lr=0.1)


def none(named_parameters: Named) -> None:
    """Return nothing."""


def closure(named_parameters: Named) -> Optimizer:
    """LBFGS."""
    return torch.optim.LBFGS([p for _, p in named_parameters])


def derived(named_parameters: Named) -> Optimizer:
    """A class of the user's that is derived from Adam, and scales by a norm."""

    class Normed(torch.optim.Adam):
        pass

    return Normed([p for _, p in named_parameters])


network = nn.Linear
