"""The order of samples that a function of the user decides."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_train.data.identity import digest_of_bytes
from hvd_train.data.random_numbers import seed_on_cpu, unchanged_numbers
from hvd_train.errors import UsageError
from hvd_train.plugin import takes
from hvd_train.progress.order import UNDECIDED, BatchLayout, GivenOrder, Order, Orders, key

OwnOrder = Callable[..., Any]
"""A function of (seed, epoch, num_samples) or (seed, epoch); it returns each sample number
once. Epochs are from 0."""
_ORDER = 4  # in a key of random numbers: separates an order from other uses of the seed


def orders_of(function: OwnOrder) -> Orders:
    """Return the orders of epochs by the user's function, for which random numbers are seeded."""

    def order(seed: int, epoch: int, num_samples: int, layout: BatchLayout) -> Order:
        arguments = (seed, epoch, num_samples)
        with unchanged_numbers():
            seed_on_cpu(key(seed, epoch, _ORDER))
            found = function(*(arguments if takes(function, *arguments) else arguments[:2]))
        samples = np.asarray(found if hasattr(found, "__len__") else [*found])
        if (
            not np.array_equal(np.sort(samples, axis=None), np.arange(num_samples))
            or samples.ndim != 1
        ):
            raise UsageError(
                f"order={_name(function)} must return each number from 0 to {num_samples - 1} "
                f"once, for epoch {epoch} (counted from 0); to repeat or leave out samples, let "
                "the data set decide in begin_epoch(epoch)"
            )
        return GivenOrder(samples.astype(np.int64))

    return order


def digest_of_orders(function: OwnOrder, seed: int, num_samples: int) -> str:
    """Return a digest of the first two epochs.

    Raises UsageError if the same epoch has two orders.
    """
    orders = orders_of(function)
    first, second, again = (
        orders(seed, epoch, num_samples, UNDECIDED)[:].tobytes() for epoch in (0, 1, 0)
    )
    if first != again:
        raise UsageError(
            f"order={_name(function)} returns another order for the same epoch when it is called "
            "again: make it a function of (seed, epoch, num_samples) alone"
        )
    return digest_of_bytes(first + second)


def _name(function: OwnOrder) -> str:
    return getattr(function, "__name__", type(function).__name__)
