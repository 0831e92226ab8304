"""A model for campaigns of faults whose training changes a state of 500 MB in every step."""

import math

import torch
from torch import Tensor, nn

from tests.support.worlds import own_generator

TO_TRAIN = "--momentum 0.9 --ema-decay 0.9"
"""With momentum and a moving average, the state has each weight three times."""
UNITS = 640_000
"""Of the first layer: 65 numbers each, of 4 bytes, three times, are 499 MB."""


class Pooled(nn.Module):
    """Add groups of k units and divide by sqrt(k): [n, 64 k] becomes [n, 64]."""

    def forward(self, units: Tensor) -> Tensor:
        parts = units.unflatten(1, (64, -1))
        return parts.sum(2) / math.sqrt(parts.shape[2])


def wide(num_classes: int) -> nn.Module:
    """Return a network with 500 MB of trained state, smooth as `runs.smooth`; a step takes half a second."""
    hidden = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    layers = nn.Linear(64, UNITS), nn.Tanh(), Pooled(), hidden, nn.Tanh(), nn.Linear(64, num_classes)
    return own_generator(nn.Sequential(nn.Flatten(), *layers))


def tolerance(weights: dict[str, Tensor], steps: int) -> float:
    """Return how far two trainings may differ if only the order of additions differs.

    Each step rounds each weight and its average once, by at most half a unit in the last place of the largest. Other
    errors are multiplied by the learning rate, and none grows, since the network has no kinks.
    """
    largest = max(float(tensor.abs().max()) for tensor in weights.values() if tensor.is_floating_point())
    return 2 * steps * largest * torch.finfo(torch.float32).eps / 2
