"""Small networks that the stages train: `--model benchmarks.gpu_check.networks:NAME`."""

from __future__ import annotations

from torch import nn


def flat(num_classes: int) -> nn.Module:
    """Return one linear layer for images of three channels and 32 x 32 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))


def normalised(num_classes: int) -> nn.Module:
    """Return a small convolutional network with batch norm for images of one channel, without kinks."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, num_classes),
    )
