"""A network that ends its rank in a chosen way: `FAILS=1:segv` in the environment, on a rank or a slot of the host."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import torch
from torch import nn

from hvd_train.launch import launcher

PASSES = 60
"""How many passes it takes before."""


def network(num_classes: int) -> nn.Module:
    """Return the network."""
    return _Failing(num_classes)


class _Failing(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self._last = nn.Linear(64, num_classes)
        self._passes = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self._passes += 1
        rank, how = os.environ["FAILS"].split(":")
        if self._passes == PASSES and rank == _own_rank() and launcher.REPLACES not in os.environ:
            print(f"the rank ends by {how}", flush=True)
            _end(how)
        logits: torch.Tensor = self._last(images.flatten(1))
        return logits


def _own_rank() -> str:
    ours = launcher.launched(os.environ)
    return str(launcher.slot(os.environ) if launcher.elastic(os.environ) else ours.rank if ours else 0)


def _end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "segv":
        ctypes.string_at(0)
    elif how == "exit":
        sys.exit(3)
    elif how == "error":
        raise RuntimeError("the network is broken")
    elif how == "memory":
        taken = []
        while True:
            taken.append(b"x" * (1 << 26))
