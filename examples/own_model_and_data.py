"""A model and data of one's own: which of 569 tumours are malignant, by 30 measurements of each.

horovodrun -np 2 python examples/own_model_and_data.py

On two cores it takes some 10 seconds, and some 96 % of the tumours that were held out are told right. Stop it with
Ctrl-C and type the same line again: it goes on.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import Dataset, random_split

import hvd_train
from hvd_train import Config


class Tumours(Dataset[tuple[Tensor, int]]):
    """The diagnostic data set of Wisconsin (Street, Wolberg and Mangasarian, 1993), which scikit-learn ships."""

    def __init__(self) -> None:
        raw = load_breast_cancer()
        rows = torch.from_numpy(raw.data).float()
        self.rows, self.labels = (rows - rows.mean(0)) / rows.std(0), raw.target.tolist()
        self.classes = tuple(map(str, raw.target_names))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], self.labels[index]


def model(num_classes: int) -> nn.Module:
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, num_classes))


def data(config: object) -> tuple[Dataset[tuple[Tensor, int]], Dataset[tuple[Tensor, int]]]:
    """Return three quarters of the tumours to train on, and the others, drawn in the same way on every rank."""
    train, val = random_split(Tumours(), [427, 142], torch.Generator().manual_seed(0))
    return train, val


if __name__ == "__main__":
    config = Config(recipe="tumours").replace(
        epochs=20, global_batch_size=32, batch_size=None, learning_rate=0.05, best_by="loss", workers=0
    )
    hvd_train.train(config, model=model, data=data)
