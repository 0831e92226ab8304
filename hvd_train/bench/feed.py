"""The batches of a training, epoch after epoch without an end, for measurements that last as long as they are told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hvd_train.config import Config
from hvd_train.data.batches import Batch, Loader
from hvd_train.progress.order import Cut, assignments, order_of
from hvd_train.world.world import Place


def batches(loader: Loader, config: Config, cut: Cut, place: Place) -> Iterator[Batch]:
    """Yield this rank's part of the global batch of each step, in the order in which training takes them."""
    for epoch in itertools.count():
        order = order_of(config.seed, epoch, loader.num_samples, config.data.repeated_augmentation)
        yield from loader.load(epoch, assignments(order, 0, cut, place.rank, place.size))
