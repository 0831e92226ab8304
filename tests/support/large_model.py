"""A model whose training has a state of 500 MB, all of which every step changes, for campaigns of faults."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.support import phases
from tests.support.worlds import own_generator

TO_TRAIN = "--momentum 0.9 --ema-decay 0.9"
"""Flags with which the state has each weight three times: itself, its momentum and its moving average."""
UNITS = 640_000
"""Of the first layer: 65 numbers each, of 4 bytes, three times, are 499 MB."""


class Pooled(nn.Module):
    """Sums of neighbouring units, as large as one unit: [n, 64 k] becomes [n, 64]."""

    def forward(self, units: Tensor) -> Tensor:
        """Return the sum of each 64th part of the units, over the square root of how many they are."""
        parts = units.unflatten(1, (64, -1))
        return parts.sum(2) / math.sqrt(parts.shape[2])


def wide(num_classes: int) -> nn.Module:
    """Return a network for the digits as wide as 500 MB of state take, smooth as `runs.smooth` is.

    One layer has spectral norm, whose buffers every forward pass changes. A multiplication for each weight and sample
    is all there is to compute, so that a step takes half a second on a core or two. All weights are trained, and all of
    their gradient travels: what a fault may tear is as large as the state is. What a worker does in a change of world
    is written down (`phases`).
    """
    phases.write_down()
    hidden = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    return own_generator(
        nn.Sequential(
            nn.Flatten(), nn.Linear(64, UNITS), nn.Tanh(), Pooled(), hidden, nn.Tanh(), nn.Linear(64, num_classes)
        )
    )


def tolerance(weights: dict[str, Tensor], steps: int) -> float:
    """Return how far two trainings of so many steps may come apart that differ in the order of additions alone.

    Each step rounds each weight and its average once: an error of at most half a unit in the last place of the largest.
    Whatever else is rounded (sums over slots, momenta) comes in multiplied by the learning rate. Errors do not grow by
    themselves, since the network has no kinks, and mostly cancel, so that adding them up leaves room.
    """
    largest = max(float(tensor.abs().max()) for tensor in weights.values() if tensor.is_floating_point())
    return 2 * steps * largest * torch.finfo(torch.float32).eps / 2
