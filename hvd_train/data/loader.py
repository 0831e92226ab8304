"""The loader that suits a data set."""

from __future__ import annotations

import torch

from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.batches import Loader
from hvd_train.data.dataset import Arrays, Source
from hvd_train.data.loader_process import Collate
from hvd_train.data.map_loader import MapLoader
from hvd_train.data.prepare import Preparation


def open_loader(
    source: Source,
    prepare: Preparation,
    device: torch.device,
    seed: int,
    num_workers: int,
    collate: Collate | None = None,
) -> Loader:
    """Return a loader of this data set: with `num_workers` loader processes, unless it is in memory.

    `collate` makes a batch of items, where that is not to stack them.
    """
    if isinstance(source, Arrays):
        return ArrayLoader(source, prepare, device, seed)
    return MapLoader(source, prepare, device, seed, num_workers, collate)
