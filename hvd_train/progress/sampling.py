"""Compute orders that draw samples by weight, or that put samples of similar length together.

No torch.
"""

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from hvd_train.progress.order import (
    BatchLayout,
    EpochOrder,
    GivenOrder,
    Indices,
    Order,
    Orders,
    key,
    scramble,
)

Numbers = npt.NDArray[np.float64]  # one for each sample
_DRAWS = 6  # in a key of random numbers: these two separate orders from other uses of the seed
_BUCKETS = 7
_WINDOW = 100  # micro-batches whose samples are sorted together


def drawn_by(weights: Numbers) -> Orders:
    """Return the orders that draw samples in proportion to these weights."""
    # divided, since their sum could overflow
    bounds = np.cumsum(weights / weights.max())

    def order(seed: int, epoch: int, num_samples: int, layout: BatchLayout) -> Order:
        return DrawnOrder(bounds, seed, epoch)

    return order


class DrawnOrder(Order):
    """Draws a sample for each position, with replacement, by the inverse of the cumulated weights.

    An epoch has as many positions as the set has samples.
    """

    repeats = True

    def __init__(self, bounds: Numbers, seed: int, epoch: int) -> None:
        """`bounds` are the sums of the weights up to each sample."""
        super().__init__(len(bounds))
        self._bounds = bounds
        self._key = np.uint64(key(seed, epoch, _DRAWS))

    @override
    def at(self, positions: Indices) -> Indices:
        words = scramble(scramble(positions.astype(np.uint64)) ^ self._key)
        shares = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
        # "right" never finds a sample of weight 0, which has the bound of the sample before it
        found: Indices = np.searchsorted(self._bounds, shares * self._bounds[-1], side="right")
        return found


class BucketOrder(GivenOrder):
    """A permutation whose micro-batches have samples of similar length.

    Shuffled samples are cut into windows and sorted by length within each. The micro-batches that a
    window is cut into go to random places of the epoch, so that steps have short and long ones.
    """

    def __init__(
        self, lengths: Numbers, seed: int, epoch: int, num_samples: int, layout: BatchLayout
    ) -> None:
        sizes = _micro_batch_sizes(layout, num_samples)
        places = EpochOrder(key(seed, _BUCKETS), epoch, len(sizes))[:]  # of the micro-batches
        widths = sizes[places]
        # from a place in the windows to a position in the epoch
        shifts = (np.cumsum(sizes) - sizes)[places] - (np.cumsum(widths) - widths)
        positions = np.arange(num_samples) + np.repeat(shifts, widths)
        windows = np.repeat(np.arange(len(widths)) // _WINDOW, widths)
        shuffled = EpochOrder(seed, epoch, num_samples)[:]
        samples = np.empty_like(shuffled)
        samples[positions] = shuffled[np.lexsort((lengths[shuffled], windows))]
        super().__init__(samples)


def _micro_batch_sizes(layout: BatchLayout, num_samples: int) -> Indices:
    """Return the size of each micro-batch of an epoch; all steps but the last are alike."""
    steps = layout.batches(range(num_samples))
    first, last = (layout.micro_batches(step).lengths for step in steps.ends)
    return np.array([*first * (len(steps) - 1), *last])
