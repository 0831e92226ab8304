"""A data set and a model that hang as the file `hang` in their folder says, once there is one: `KIND RANK PASS`.

From that forward pass on; ranks see the file at different times.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NUM_SAMPLES = 240
_lock = threading.Lock()


def _asked(passes: int | None = None) -> str:
    """Return the kind of hang that is asked of this rank, or of all others; empty without any."""
    try:
        kind, rank, first = Path("hang").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return ""
    if passes is not None and passes < int(first):
        return ""
    own = os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    return kind if (rank == own) is (kind != "skip") else ""


class Samples:
    """Images of one colour, in two classes."""

    classes = ("even", "odd")

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        kind = _asked()
        if kind == "loader":
            wait_for_ever()
        if kind == "files":
            with open("fifo", "rb") as file:  # line of files
                file.read()
        return torch.full((1, 8, 8), index / NUM_SAMPLES), index % 2


class Net(nn.Module):
    """A linear layer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        self.passes += 1
        kind = _asked(self.passes)
        if kind == "lock":
            wait_for_ever()
        if kind == "loop":
            loop_for_ever()
        if kind == "skip":
            sum_alone()
        scores: Tensor = self.layer(images.flatten(1))
        return scores


def wait_for_ever() -> None:
    """Take a lock that this thread has already."""
    _lock.acquire()
    _lock.acquire()  # line of lock


def loop_for_ever() -> None:
    """Count."""
    count = 0
    while True:
        count += 1  # line of loop


def sum_alone() -> None:
    """Call a collective that one rank leaves out."""
    import horovod.torch as hvd

    hvd.allreduce(torch.ones(1), name="of some ranks")  # line of skip


def data(_: object) -> tuple[Any, None]:
    """Return the data set, without one to validate on."""
    return Samples(), None


def model(num_classes: int) -> nn.Module:
    """Return the model."""
    return Net(num_classes)
