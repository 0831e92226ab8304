"""The networks that compared programs train on the digits, each gated so that they take turns (`benchmarks.turns`)."""

from __future__ import annotations

import time

from torch import Tensor, nn

from benchmarks.turns import gated
from hvd_train.network.small import digits_convnet


class Grey(nn.Module):
    """Repeats the one channel of images three times."""

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        return images.expand(-1, 3, -1, -1)


def _of_torchvision(name: str, num_classes: int) -> nn.Module:
    from torchvision import models  # here, since it imports torch's compiler, which costs seconds

    return nn.Sequential(Grey(), getattr(models, name)(num_classes=num_classes))


def small(num_classes: int) -> nn.Module:
    """Return one convolution and one linear layer for images of three channels, for a look at what the others do."""
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )
    return gated(nn.Sequential(*layers))


def waiting(num_classes: int) -> nn.Module:
    """Return a small network whose forward pass takes 50 ms and leaves the cores free, as one on a GPU might."""
    model = digits_convnet(num_classes)
    model.register_forward_hook(lambda model, *_: time.sleep(0.05) if model.training else None)
    return gated(model)


def convnet(num_classes: int) -> nn.Module:
    """Return the digits recipe's own network, with 0.09 million parameters."""
    return gated(digits_convnet(num_classes))


def resnet18(num_classes: int) -> nn.Module:
    """Return torchvision's ResNet-18: 11.2 million parameters with 10 classes."""
    return gated(_of_torchvision("resnet18", num_classes))


def resnet50(num_classes: int) -> nn.Module:
    """Return torchvision's ResNet-50: 23.5 million parameters with 10 classes."""
    return gated(_of_torchvision("resnet50", num_classes))


def mobilenet(num_classes: int) -> nn.Module:
    """Return torchvision's MobileNetV3-large: 4.2 million parameters with 10 classes, in 174 tensors."""
    return gated(_of_torchvision("mobilenet_v3_large", num_classes))


def vgg11(num_classes: int) -> nn.Module:
    """Return torchvision's VGG-11: 128.8 million parameters with 10 classes."""
    return gated(_of_torchvision("vgg11", num_classes))
