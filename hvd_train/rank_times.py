"""What a rank tells the others of its own time, as numbers that travel with a step, and what it hears of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_train.progress.clock import PHASES, Split
from hvd_train.progress.slow_ranks import COLUMNS, Times, step_seconds
from hvd_train.world import cores
from hvd_train.world.world import Place

_APART_S, _MOST_APART = 0.25, 100  # seconds and steps from one telling to the next: it takes 0.2 ms


@dataclass
class OwnTimes:
    """The time of this rank since it has last told of it, in one world."""

    split: Split
    queued: Callable[[], float] = cores.queued_s
    _samples: int = 0
    _steps: int = 0
    _queued: float | None = None
    _told_at: int = 0
    _next_at: int = 0

    def is_due(self, step: int) -> bool:
        """Return whether the ranks tell in this step, if it is logged. All of them say the same."""
        return step >= self._next_at

    def heard(self, times: Times, step: int) -> int:
        """Take what all have told in a step, from which follows when they tell again; return over how many steps."""
        apart = _APART_S / max(step_seconds(times), _APART_S / _MOST_APART) if times.any() else 1
        num_steps, self._told_at, self._next_at = step - self._told_at, step, step + math.ceil(apart)
        return num_steps

    def took(self, num_samples: int) -> None:
        """Count the samples that this rank has in a step."""
        self._samples += num_samples
        self._steps += 1

    def tell(self) -> tuple[float, ...]:
        """Return the means of COLUMNS since the last call; zeros where there is nothing to tell."""
        queued, before, means = self.queued(), self._queued, self.split.take_until_reduction()
        samples, steps, self._samples, self._steps, self._queued = self._samples, self._steps, 0, 0, queued
        if means is None or before is None or not steps:
            return (0.0,) * len(COLUMNS)
        return (*(means[phase] for phase in PHASES), (queued - before) / steps, samples / steps)


class TimesOfRanks:
    """Where the times of all ranks lie among the numbers of a step: a row for each rank, in which others put zeros."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self._num_ranks, self._device = place.size, device
        self.size = place.size * len(COLUMNS) if place.size > 1 else 0
        """How many numbers these are; 0 for one rank. It is the same in each step: else the ranks would agree anew."""
        self._nothing = torch.zeros(self.size, device=device)
        begin = place.rank * len(COLUMNS)
        self._before, self._after = self._nothing[:begin], self._nothing[begin + len(COLUMNS) :]

    def told(self, own: Sequence[float]) -> Tensor:
        """Return what this rank adds to the numbers of a step: its row, or nothing without one."""
        if not (own and self.size):
            return self._nothing
        row = torch.tensor(own, dtype=torch.float32, pin_memory=self._device.type == "cuda")
        return torch.cat([self._before, row.to(self._device, non_blocking=True), self._after])

    def heard(self, numbers: Tensor) -> Times:
        """Return the sum of what all ranks have told, [ranks, COLUMNS], which the device has computed by then."""
        return numbers.cpu().double().numpy().reshape(self._num_ranks, len(COLUMNS))
