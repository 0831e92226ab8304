"""Models by name, and models of the user."""

import torch
from torch import nn

from hvd_train.network import models


def test_models_of_timm_by_name() -> None:
    for channels in (1, 3):
        model = models.build("timm:resnet10t", num_classes=7, channels=channels, seed=0)
        assert model.eval()(torch.zeros(2, channels, 32, 32)).shape == (2, 7)


def test_the_digits_network_pools_as_adaptively_as_torch() -> None:
    """Its own pooling has a deterministic gradient on GPUs."""
    model = models.digits_convnet(10)
    for size in range(8, 14):
        images = torch.cos(torch.arange(2.0 * size * (size + 1))).view(2, 1, size, size + 1)
        expected = model[8:](nn.AdaptiveMaxPool2d(2)(model[:7](images)))
        assert torch.equal(model(images), expected)
