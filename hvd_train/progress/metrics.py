"""Exact sums of what a model gets right: they add over slots, ranks and steps, and are divided once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_PLACES = 5
NUM_SUMS = 1 + _PLACES
"""Numbers that `sums_of` gives and `Totals.of` reads."""


@dataclass(frozen=True)
class Totals:
    """Sums over samples: of the loss, of hits at rank 1 and among the first 5, and the number of samples."""

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, sums: Sequence[float], count: int) -> Totals:
        """What `sums_of` has given, added up over so many samples."""
        loss, *by_place = sums
        return cls(loss, by_place[0], sum(by_place), count)

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.loss + other.loss, self.top1 + other.top1, self.top5 + other.top5, self.count + other.count)

    def means(self) -> dict[str, float]:
        """Mean loss, top-1 and top-5 (shares of 1); NaN over no samples."""
        if self.count == 0:
            return {"loss": float("nan"), "top1": float("nan"), "top5": float("nan")}
        return {name: getattr(self, name) / self.count for name in ("loss", "top1", "top5")}


def hits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """For logits [n, classes] and targets [n]: whether the target is first, and among the first five; bool [n]."""
    match = _matches(logits, targets)
    return match[:, 0], match.any(dim=1)


def sums_of(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """A micro-batch's sum of losses (a scalar), and its hits at each of the first five places; float32 [NUM_SUMS]."""
    by_place = _matches(logits, targets).sum(dim=0, dtype=torch.float32)
    if len(by_place) < _PLACES:
        by_place = F.pad(by_place, (0, _PLACES - len(by_place)))
    return torch.cat([loss.float().unsqueeze(0), by_place])


def _matches(logits: Tensor, targets: Tensor) -> Tensor:
    """Whether the target is at each of the first five places; bool [n, 5], fewer where there are fewer classes."""
    best = logits.topk(min(_PLACES, logits.shape[1]), dim=1).indices
    return best == targets.unsqueeze(1)
