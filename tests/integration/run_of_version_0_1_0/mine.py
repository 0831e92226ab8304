"""The network of the run folder beside this file, which version 0.1.0 wrote before its modules were moved into rooms.

`STOP_AT_PASS=32 hvd-train train digits --model mine:model --epochs 4 --ema-decay 0.9 --ledger --output-dir run
--device cpu --commit-steps 10 --learning-rate 0.1` made it: SIGTERM stopped the training in the middle of epoch 2.
"""

import os
import signal

import torch
from torch import nn


class Net(nn.Module):
    """Batch norm and a linear layer; `STOP_AT_PASS` in the environment names the forward pass that asks to stop."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, num_classes))
        self.passes = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if str(self.passes) == os.environ.get("STOP_AT_PASS"):
            os.kill(os.getpid(), signal.SIGTERM)
        logits: torch.Tensor = self.layers(images)
        return logits


def model(num_classes: int) -> nn.Module:
    """Return the network."""
    return Net(num_classes)
