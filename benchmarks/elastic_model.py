"""The small network that both sides of `benchmarks.recovery` train; its step takes as long as one on a GPU might."""

from __future__ import annotations

import time

from torch import nn

STEP_S = 0.05


def network(num_classes: int = 10) -> nn.Module:
    """Return a network for the digits whose training pass takes `STEP_S` seconds and leaves the cores free."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_classes))
    model.register_forward_hook(lambda module, *_: time.sleep(STEP_S) if module.training else None)
    return model
