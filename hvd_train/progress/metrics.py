"""Exact sums of losses and hits: they add up over micro-batches, ranks and steps, and are divided once at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_PLACES = 5
NUM_SUMS = 1 + _PLACES
"""How many numbers `sums_of` returns and `Totals.of` takes: the loss, and the hits at each of five places."""


@dataclass(frozen=True)
class Totals:
    """Sums over samples: of the loss, of top-1 hits and of top-5 hits; and the number of samples, `count`."""

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, sums: Sequence[float], count: int) -> Totals:
        """Make totals of what `sums_of` returned, added up over micro-batches that hold `count` samples in all."""
        loss, *by_place = sums
        return cls(loss, by_place[0], sum(by_place), count)

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.loss + other.loss, self.top1 + other.top1, self.top5 + other.top5, self.count + other.count)

    def means(self) -> dict[str, float]:
        """Return the mean loss, and top-1 and top-5 as shares from 0 to 1; NaN over no samples."""
        return {name: getattr(self, name) / self.count if self.count else math.nan for name in ("loss", "top1", "top5")}


def hits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return two bool [n]: whether a sample's target has the highest logit, and whether it is among the highest five.

    `logits` are [n, classes], `targets` int64 [n].
    """
    match = _matches(logits, targets)
    return match[:, 0], match.any(dim=1)


def sums_of(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Return a micro-batch's sum of losses and its hits at each of the first five places, as float32 [NUM_SUMS].

    `loss` is that sum, a scalar; `logits` are [n, classes], `targets` int64 [n].
    """
    by_place = _matches(logits, targets).sum(dim=0, dtype=torch.float32)
    if len(by_place) < _PLACES:
        by_place = F.pad(by_place, (0, _PLACES - len(by_place)))
    return torch.cat([loss.float().unsqueeze(0), by_place])


def _matches(logits: Tensor, targets: Tensor) -> Tensor:
    """Return whether the target has the highest logit, the second, ... the fifth: bool [n, min(5, classes)]."""
    best = logits.topk(min(_PLACES, logits.shape[1]), dim=1).indices
    return best == targets.unsqueeze(1)
