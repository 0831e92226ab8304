"""A task as users write them, with a network, data and a collate that go with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from hvd_train import Figure, Task, mean
from hvd_train.data.dataset import DataSet
from tests.support.worlds import own_generator

HERE = "tests.support.own_tasks"
FIGURES = ["loss", "bias", "median", "spread"]


def errors(data: DataSet, scale: float = 1.0, best: str = "median") -> Task:
    """Return the task of predicting a number: with a figure without order, and two of evaluations alone."""
    return Task(
        loss=lambda predicted, targets: scale * (predicted - targets).square(),
        measures=lambda predicted, targets: {"bias": predicted - targets},
        evaluated_measures=lambda predicted, targets: {"of_targets": torch.stack([targets, targets.square()], dim=1)},
        stored=lambda predicted, targets: {"error": (predicted - targets).abs()},
        figures=(
            mean("bias", form=".3f"),
            Figure(
                "median",
                "median error",
                "lower",
                value=lambda sums, count: float(np.median(sums["error"])),
                in_training=False,
            ),
            Figure("spread", "spread", value=_spread, in_training=False),
        ),
        best=best,
        outputs=1,
    )


def _spread(sums: Any, count: int) -> float:
    total, squares = sums["of_targets"]
    return float(squares / count - (total / count) ** 2)


def line(outputs: int = 1) -> nn.Module:
    """Return a network for rows of three numbers, with one number for each."""
    return own_generator(nn.Sequential(nn.Linear(3, outputs), nn.Flatten(0)))


def rows(config: object) -> tuple[TensorDataset, TensorDataset]:
    """Return 20 rows to train on and 7 others."""
    train, val = (_drawn(count, seed) for count, seed in ((20, 1), (7, 2)))
    return TensorDataset(*train), TensorDataset(*val)


def _drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator)
    return inputs, inputs @ torch.tensor([1.0, -2.0, 0.5]) + torch.randn(count, generator=generator)


class Sequences:
    """Twelve sequences of one to four numbers, and the sum of each."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        numbers = torch.cos(torch.arange(index % 4 + 1) + index)
        return numbers, float(numbers.sum())


def padded(items: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Return sequences as one tensor with their lengths, and the targets."""
    sequences, targets = zip(*items, strict=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return {"numbers": pad_sequence([*sequences], batch_first=True), "lengths": lengths}, torch.tensor(targets)
