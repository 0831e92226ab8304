"""A model for digits that runs out of memory: `--model tests.support.greedy:network`.

GREEDY names what it breaks and on which ranks: "train:0,1" a training pass after the third one, "update:1" an update of
the weights that is half done, "evaluation:0" an evaluation, "above-6:1" training passes with more than six samples.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn


class Network(nn.Module):
    """A linear layer that counts its passes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        self.passes = 0
        what, _, ranks = os.environ["GREEDY"].partition(":")
        self.breaks = what if os.environ.get("HOROVOD_RANK", "0") in ranks.split(",") else ""
        self.most = int(self.breaks.removeprefix("above-")) if self.breaks.startswith("above-") else None
        if self.breaks == "update":
            torch.optim.SGD.step = _half_a_step  # type: ignore[method-assign]

    def forward(self, images: Tensor) -> Tensor:
        self.passes += self.training
        if self.breaks == ("train" if self.training else "evaluation") and self.passes > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if self.training and self.most is not None and len(images) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        logits: Tensor = self.layer(images.flatten(1))
        return logits


def network(num_classes: int) -> nn.Module:
    """Return the model."""
    return Network(num_classes)


def _half_a_step(optimizer: torch.optim.SGD, closure: None = None) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].fill_(7.0)
    raise torch.OutOfMemoryError("CUDA out of memory.")
