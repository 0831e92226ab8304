"""The loader that suits a data set."""

from __future__ import annotations

import torch

from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.dataset import Arrays
from hvd_train.data.loader import open_loader
from hvd_train.data.map_loader import MapLoader
from tests.support.batches import CPU, PLAIN, RandomItems


def test_data_in_memory_need_no_loader_processes() -> None:
    """Arrays become batches in this process, however many loader processes are asked for; items are read by them."""
    arrays = Arrays(torch.zeros(3, 1, 2, 2), torch.zeros(3), 5)
    in_memory, items = (open_loader(source, PLAIN, CPU, 0, 0) for source in (arrays, RandomItems()))
    assert isinstance(in_memory, ArrayLoader)
    assert isinstance(items, MapLoader)
    assert (in_memory.num_samples, items.num_samples) == (5, 30)
    items.close()
