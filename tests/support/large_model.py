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
    """Sums of neighbouring units, over the square root of how many they are: [n, 64 k] becomes [n, 64]."""

    def forward(self, units: Tensor) -> Tensor:
        parts = units.unflatten(1, (64, -1))
        return parts.sum(2) / math.sqrt(parts.shape[2])


def wide(num_classes: int) -> nn.Module:
    """Return a network for the digits with 500 MB of state, smooth as `runs.smooth` is, which writes down `phases`.

    A step takes half a second on a core or two. All weights are trained, and all their gradients are summed.
    """
    phases.write_down()
    hidden = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    layers = nn.Linear(64, UNITS), nn.Tanh(), Pooled(), hidden, nn.Tanh(), nn.Linear(64, num_classes)
    return own_generator(nn.Sequential(nn.Flatten(), *layers))


def tolerance(weights: dict[str, Tensor], steps: int) -> float:
    """Return how far two trainings may differ that differ in the order of additions alone.

    Each step rounds each weight and its average once: by at most half a unit in the last place of the largest. Other
    errors are multiplied by the learning rate, and none grows, since the network has no kinks.
    """
    largest = max(float(tensor.abs().max()) for tensor in weights.values() if tensor.is_floating_point())
    return 2 * steps * largest * torch.finfo(torch.float32).eps / 2
