"""Whether a larger batch fits into the memory of a host, worked out beforehand: Linux would kill who takes too much."""

from __future__ import annotations

import resource
from collections.abc import Mapping

import psutil

from hvd_train.world import control_groups
from hvd_train.world.world import Place

_USED = 0.9  # of what is left: others on the host take some, too


def predicted_peak(resident: float, peaks: Mapping[int, float], batch_size: int) -> float:
    """Return the bytes that a rank will hold at its peak with a batch larger than those measured.

    `peaks` are those of smaller sizes that were measured, and `resident` is what the rank held before the first. It is
    the higher one of two straight lines through the peak of the largest of these: from `resident` without samples,
    which takes all that a step needs for what grows with the batch, and from the second largest.
    """
    *smaller, largest = sorted(peaks)
    origins = {0: resident, **{size: peaks[size] for size in smaller[-1:]}}
    slopes = ((peaks[largest] - peak) / (largest - size) for size, peak in origins.items())
    return peaks[largest] + (batch_size - largest) * max(0.0, *slopes)


def left_for_a_rank(place: Place) -> float:
    """Return the bytes that a rank may take beside what it holds, if all ranks of its host take as many.

    That is its share of what the host has left, or the control groups around it; and no more than a limit on its
    address space (`ulimit -v`) leaves to it alone.
    """
    limit = control_groups.memory_left()
    of_host = float(psutil.virtual_memory().available)
    share = (of_host if limit is None else min(of_host, limit)) / place.local_size
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        share = min(share, addresses - psutil.Process().memory_info().vms)
    return _USED * share
