"""Slots dealt by speed (`--balance`): where ranks are not equally fast, a faster one computes more slots of a step.

That changes nothing of the result, which the slots decide and not who computes them. All ranks are told the same times
in logged steps, to the bit, so all deal the same slots without a word. A rank keeps a slot at least, so that its speed
stays known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hvd_train.progress.order import dealt
from hvd_train.progress.slow_ranks import BY_SAMPLES, SAMPLES, Times, step_seconds

STRETCH_S = 3.5
"""For how many seconds of steps ranks are timed; then slots are dealt by that alone, if it is worth it."""
PAUSE_S = 60.0
"""So many seconds of steps pass from one deal to the next in a world."""
LEAST_GAIN = 0.05
"""Slots stay as they are where steps would be shorter by less than this part of them."""


class Balance:
    """Measures the ranks that compute, and says how the slots are dealt over them."""

    def __init__(self, ranks: Sequence[int], *, is_on: bool) -> None:
        """In this world these `ranks` compute; what was known in another one, newcomers would not know."""
        self._ranks, self._is_on = ranks, is_on
        self._seconds: tuple[float, ...] = ()
        self._in_use: tuple[float, ...] = ()
        self._since_deal = PAUSE_S
        self._is_warm = False
        self._begin_stretch()

    def _begin_stretch(self) -> None:
        self._sum: Times | float = 0.0
        self._steps, self._stretch_s = 0, 0.0

    @property
    def is_new(self) -> bool:
        """Whether slots are to be dealt otherwise than when `deal` was last called."""
        return self._seconds != self._in_use

    def deal(self) -> Sequence[float]:
        """Return what a slot takes on each rank that computes, to deal slots by; empty where they are dealt in turn."""
        self._in_use = self._seconds
        return self._seconds

    def owner(self, slot: int, num_slots: int) -> int:
        """Return which rank computes a slot of a step of `num_slots`, as they were last dealt."""
        return self._ranks[dealt(num_slots, len(self._ranks), self._in_use)[slot]]

    def hear(self, times: Times, num_steps: int, num_slots: int) -> bool:
        """Take what all ranks have told of `num_steps` steps; return whether slots are to be dealt otherwise by that.

        `num_slots` are those of a whole step.
        """
        if not self._is_on:
            return False
        if not self._is_warm:  # the first steps of a world pay for much that does not come again
            self._is_warm = True
            return False
        self._sum, self._steps = self._sum + num_steps * times, self._steps + num_steps
        seconds = num_steps * step_seconds(times)
        self._stretch_s += seconds
        self._since_deal += seconds
        if self._stretch_s < STRETCH_S:
            return False
        means: Times = np.asarray(self._sum) / self._steps
        self._begin_stretch()
        own = means[list(self._ranks)]
        if self._since_deal < PAUSE_S or not own[:, SAMPLES].all():
            return False
        seconds_now = tuple((own[:, BY_SAMPLES].sum(axis=1) / own[:, SAMPLES]).tolist())
        before = longest(dealt(num_slots, len(self._ranks), self._seconds), seconds_now)
        after = longest(dealt(num_slots, len(self._ranks), seconds_now), seconds_now)
        if after > (1 - LEAST_GAIN) * before:
            return False
        self._seconds, self._since_deal = seconds_now, 0.0
        return True

    def slots_of(self, num_slots: int, num_ranks: int) -> list[int]:
        """Return how many slots of a step of `num_slots` each rank of the world has."""
        counts = Counter(self._ranks[number] for number in dealt(num_slots, len(self._ranks), self._seconds))
        return [counts[rank] for rank in range(num_ranks)]


def longest(owners: Sequence[int], seconds: Sequence[float]) -> float:
    """Return what the slots of a step take, at `seconds` a slot on each rank, until the last rank is done."""
    return max(count * seconds[rank] for rank, count in Counter(owners).items())
