"""Optimizers that look as if they could serve."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

HERE = "tests.support.odd_optimizers"
Named = Sequence[tuple[str, nn.Parameter]]
_calls = itertools.count()


class Numpy(torch.optim.SGD):
    """Counts its steps in a number of numpy's, which is a Python float as well, but not for a checkpoint."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)

    def step(self, closure: Any = None) -> None:
        """Count."""
        for p in self.param_groups[0]["params"]:
            self.state[p]["steps"] = np.float64(self.state[p].get("steps", 0) + 1)
        super().step()


def numpy_rates(named_parameters: Named, lr: float, weight_decay: float = 0.0) -> Optimizer:
    """SGD with learning rates of numpy's."""
    rates = np.linspace(lr, 2 * lr, len(named_parameters), dtype=np.float32)
    groups = [{"params": [p], "lr": rate} for (_, p), rate in zip(named_parameters, rates, strict=True)]
    return torch.optim.SGD(groups, weight_decay=weight_decay)


def in_any_order(named_parameters: Named, lr: float, weight_decay: float = 0.0) -> Optimizer:
    """Adam of the parameters in another order at each call, as those in a set have one in each process."""
    turn = next(_calls) % len(named_parameters)
    turned = [*named_parameters[turn:], *named_parameters[:turn]]
    return torch.optim.Adam([{"params": turned}], lr=lr, weight_decay=weight_decay)


def groups_in_any_order(named_parameters: Named, lr: float, weight_decay: float = 0.0) -> Optimizer:
    """Adam with two groups that change places at each call."""
    turn = 1 if next(_calls) % 2 else -1
    groups = [{"params": [p for _, p in named_parameters[half::2]]} for half in (0, 1)]
    return torch.optim.Adam(groups[::turn], lr=lr, weight_decay=weight_decay)


class Rest(torch.optim.SGD):
    """Hands on whatever it is given."""

    def __init__(self, params: Any, **rest: Any) -> None:
        super().__init__(params, **rest)


class OwnRate(torch.optim.SGD):
    """Shows a learning rate in its groups, and steps by the one that it was made with."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)
        self.lr = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move each weight."""
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-self.lr)


class Stateless(Rest):
    """Has no state to give."""

    def state_dict(self) -> Any:
        """Refuse."""
        return {}["state"]


class Wrapped(Rest):
    """Gives the state of another one."""

    def state_dict(self) -> Any:
        """Wrap it."""
        return {"inner": super().state_dict()}


class Nameless(Rest):
    """Fails without a word."""

    def step(self, closure: Any = None) -> None:
        """Look up what is not there."""
        raise KeyError("x")


class RestOfPlain(torch.optim.SGD):
    """Hands it on to one that knows no weight decay."""

    def __init__(self, params: Any, **rest: Any) -> None:
        self.make(params, **rest)

    def make(self, params: Any, lr: float) -> None:
        """Be made."""
        super().__init__(params, lr)


def of_any(named_parameters: Named, **rest: Any) -> Optimizer:
    """SGD with whatever it is given."""
    return torch.optim.SGD([p for _, p in named_parameters], **rest)


class Frozen(Rest):
    """Keeps its parameters in a tuple."""

    def __init__(self, params: Any, **rest: Any) -> None:
        super().__init__(params, **rest)
        for group in self.param_groups:
            group["params"] = tuple(group["params"])


class Silent(Rest):
    """Gives nothing."""

    def state_dict(self) -> Any:
        """Return nothing."""
