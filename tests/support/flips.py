"""A network and an optimizer in which one bit of one rank's memory changes, where the variable FLIPS says so."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = "tests.support.flips"
KINDS = ("weight", "momentum", "statistic", "sum")
"""What changes: a weight, its momentum, a running statistic, or a gradient as it was received: summed over all.

Statistics change between steps: what changes in the forward pass of a slot is taken for what the slot has made of them.
"""
_STEPPING: list[Momentum] = []  # the one that trains: Horovod's way makes a class, and an object, of its own
_NETWORKS: list[nn.Module] = []
_IN_STEP: list[dict[str, Any]] = []  # what is to happen in the next step


class Momentum(torch.optim.SGD):
    """SGD with momentum, in whose step flips happen that do not in a forward pass."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        _STEPPING[:] = [self]
        flips, statistics = list(_IN_STEP), [s for net in _NETWORKS for s in net.buffers() if s.is_floating_point()]
        _IN_STEP.clear()
        for flip in flips:
            if flip["kind"] == "sum":
                _flip([p.grad for group in self.param_groups for p in group["params"]], flip)
        result = super().step(closure)
        for flip in flips:
            if flip["kind"] == "statistic":
                _flip(statistics, flip)
        return result


def network(num_classes: int) -> nn.Module:
    """Return a network for digits with running statistics; it does in its training passes what FLIPS says.

    FLIPS is a list of {"name", "rank", "pass", "kind", "tensor", "element", "bit"}: before which of a process's
    training passes, counted from 1, a bit flips; "tensor" and "element" are fractions of how many there are. Each flip
    happens once in a run, and leaves an empty file "name" in the working folder.
    """
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, num_classes))
    flips, passes = json.loads(os.environ.get("FLIPS", "[]")), 0

    def before(module: nn.Module, *_: object) -> None:
        nonlocal passes
        passes += module.training
        for flip in flips:
            if module.training and passes == flip["pass"] and _rank() == flip["rank"] and _first(flip["name"]):
                _spoil(net, flip)

    net.register_forward_pre_hook(before)
    _NETWORKS[:] = [net]
    return net


def _rank() -> int:
    import horovod.torch as hvd  # only a launcher's ranks have it

    return int(hvd.rank())


def _first(name: str) -> bool:
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _spoil(net: nn.Module, flip: dict[str, Any]) -> None:
    parameters = list(net.parameters())
    if flip["kind"] in ("sum", "statistic"):
        _IN_STEP.append(flip)
    elif flip["kind"] == "weight":
        _flip(parameters, flip)
    else:
        _flip((_STEPPING[0].state[parameter]["momentum_buffer"] for parameter in parameters), flip)


@torch.no_grad()
def _flip(tensors: Iterable[Tensor], flip: dict[str, Any]) -> None:
    among = list(tensors)
    tensor = among[int(flip["tensor"] * len(among))]
    at = int(flip["element"] * tensor.numel())
    number = tensor.detach().view(-1)[at : at + 1].view(torch.int32)
    number.bitwise_xor_((1 << flip["bit"]) if flip["bit"] < 31 else -(1 << 31))
