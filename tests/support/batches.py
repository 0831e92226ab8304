"""Data sets and preparations for tests of the loaders."""

import random

import numpy as np
import torch
from torch import Tensor

from hvd_train.data.batches import Batch
from hvd_train.data.dataset import DataSet
from hvd_train.data.prepare import Prepare

CPU = torch.device("cpu")
PLAIN_DATA = DataSet((), None, ("a",), channels=1)  # type: ignore[arg-type]
PLAIN = Prepare(PLAIN_DATA, CPU, image_size=None, augment=None, colour=False)


class RandomItems:
    """A map-style data set of 30 items, which draw from all three generators that transforms use."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor([index, *drawn]).view(1, 2, 2), index % 3


def flat(batches: list[Batch]) -> Tensor:
    return torch.cat([micro.inputs.flatten(1) for batch in batches for micro in batch.micro_batches])
