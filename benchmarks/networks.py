"""What the programs of a comparison train, gated (`benchmarks.turns`)."""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.models import resnet50 as torchvision_resnet50

from benchmarks.turns import gated
from hvd_train.models import digits_convnet


class Grey(nn.Module):
    """Takes images of one channel to three equal ones."""

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        return images.expand(-1, 3, -1, -1)


def resnet50(num_classes: int) -> nn.Module:
    """For the digits: 23.5 million parameters with 10 classes."""
    return gated(nn.Sequential(Grey(), torchvision_resnet50(num_classes=num_classes)))


def convnet(num_classes: int) -> nn.Module:
    """The digits recipe's own network."""
    return gated(digits_convnet(num_classes))
