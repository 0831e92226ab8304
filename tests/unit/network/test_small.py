"""The small networks of our own."""

from __future__ import annotations

import torch
from torch import nn

from hvd_train.network import small


def test_images_of_8_x_8_keep_their_size_until_they_are_pooled() -> None:
    """What digits-convnet makes of them, layer by layer; its weights have the names and shapes of checkpoints."""
    model = small.digits_convnet(7, channels=2)
    images, shapes = torch.zeros(5, 2, 8, 8), list[tuple[int, ...]]()
    for layer in model:
        images = layer(images)
        if not isinstance(layer, nn.ReLU):
            shapes.append(tuple(images.shape[1:]))
    assert shapes == [(32, 8, 8), (64, 8, 8), (64, 4, 4), (64, 4, 4), (64, 2, 2), (256,), (128,), (7,)]
    assert {name: tuple(value.shape) for name, value in model.state_dict().items() if name.endswith("weight")} == {
        "0.weight": (32, 2, 3, 3),
        "2.weight": (64, 32, 3, 3),
        "5.weight": (64, 64, 3, 3),
        "9.weight": (128, 256),
        "11.weight": (7, 128),
    }
    assert model(torch.zeros(1, 2, 12, 9)).shape == (1, 7), "or a few more pixels"
