"""Repeat and time an action on all ranks, and yield batches without an end."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from hvd_train.config import Config
from hvd_train.data.batches import Batch, Loader
from hvd_train.network.device import synchronize
from hvd_train.progress.order import assignments, choose_layout, order_of
from hvd_train.world.world import Place, World, barrier

T = TypeVar("T")


def repeat(world: World, device: torch.device, action: Callable[[], T], count: int) -> tuple[list[T], list[float]]:
    """Repeat an action on all ranks; return this rank's results and the slowest rank's seconds."""
    results, seconds = list[T](), list[float]()
    for _ in range(count):
        barrier(world)
        synchronize(device)
        started = time.perf_counter()
        results.append(action())
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return results, [max(of_ranks) for of_ranks in zip(*world.gather(seconds), strict=True)]


def batches(loader: Loader, config: Config, place: Place) -> Iterator[Batch]:
    """Yield this rank's batches in the order of training, epoch after epoch without an end."""
    layout = choose_layout(config.batch, place.size, loader.num_samples)
    for epoch in itertools.count():
        order = order_of(config.seed, epoch, loader.num_samples, config.data.repeated_augmentation)
        yield from loader.load(epoch, assignments(order, 0, layout, place.rank, place.size))
