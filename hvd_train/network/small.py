"""Small networks for the recipes that train in a minute on two processor cores, one for each kind of data."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def digits_convnet(num_classes: int, channels: int = 1) -> nn.Module:
    """Return a network of three convolutions and two linear layers for images of 8 x 8 pixels or a few more.

    It maps images [batch, channels, height, width] to logits [batch, num_classes] and has 0.1 million parameters, no
    batch norm and no dropout.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


class SegmentationConvnet(nn.Module):
    """Convolutions at two sizes of the picture, joined as in U-Net (Ronneberger and others, 2015), on a small scale."""

    def __init__(self, num_classes: int, channels: int = 1) -> None:
        super().__init__()
        self.fine = nn.Sequential(_convolution(channels, 16), _convolution(16, 16))
        self.coarse = nn.Sequential(nn.MaxPool2d(2), _convolution(16, 32), _convolution(32, 32))
        self.joined = nn.Sequential(_convolution(48, 16), nn.Conv2d(16, num_classes, kernel_size=1))

    def forward(self, images: Tensor) -> Tensor:
        """Images [n, channels, height, width] to logits [n, num_classes, height, width]; the sides are even."""
        fine = self.fine(images)
        coarse = F.interpolate(self.coarse(fine), scale_factor=2, mode="nearest")
        logits: Tensor = self.joined(torch.cat([fine, coarse], dim=1))
        return logits


class TableNetwork(nn.Module):
    """Two hidden layers of 64, for rows of numbers."""

    def __init__(self, num_outputs: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_outputs)
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [n, width] to [n, num_outputs]."""
        outputs: Tensor = self.layers(rows)
        return outputs


class SmallTransformer(nn.Module):
    """A causal transformer (Vaswani and others, 2017; norms before the layers) of two blocks, 128 numbers wide."""

    longest = 256  # tokens
    width, heads, blocks = 128, 4, 2

    def __init__(self, vocabulary: int, channels: int = 1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, self.width), nn.Embedding(self.longest, self.width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.layers = nn.ModuleList(_Block(self.width, self.heads) for _ in range(self.blocks))
        self.head = nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [n, length] to logits [n, length, vocabulary] of the token after each."""
        states = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.layers:
            states = block(states)
        logits: Tensor = self.head(states)
        return logits


class _Block(nn.Module):
    """Attention to the tokens before, and a layer for each token by itself; each adds to what it is given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: Tensor) -> Tensor:
        """States [n, length, width] to such states."""
        count, length, width = states.shape
        parts = self.attention(self.before_attention(states)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.out(seen.transpose(1, 2).reshape(count, length, width))
        result: Tensor = states + self.layers(self.before_layers(states))
        return result


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU())


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "digits-convnet": digits_convnet,
    "segmentation-convnet": SegmentationConvnet,
    "table-network": TableNetwork,
    "small-transformer": SmallTransformer,
}
"""Our own networks by name: each is made for a number of outputs, and of channels of an image or numbers in a row."""
