"""Sum losses and hits exactly, and divide once at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_PLACES = 5
NUM_SUMS = 1 + _PLACES  # of `sums_of`: the loss, and the hits at each place


@dataclass(frozen=True)
class Totals:
    """Sums of loss, top-1 hits and top-5 hits over `count` samples."""

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, sums: Sequence[float], count: int) -> Totals:
        """Make totals from the added-up `sums_of` micro-batches with `count` samples in all."""
        loss, *by_place = sums
        return cls(loss, by_place[0], sum(by_place), count)

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.loss + other.loss, self.top1 + other.top1, self.top5 + other.top5, self.count + other.count)

    def means(self) -> dict[str, float]:
        """Return mean loss, top-1 and top-5 accuracy (0 to 1). NaN without samples."""
        return {name: getattr(self, name) / self.count if self.count else math.nan for name in ("loss", "top1", "top5")}


def hits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return top-1 and top-5 hits, bool [n] each. `logits` are [n, classes], `targets` int64 [n]."""
    match = _matches(logits, targets)
    return match[:, 0], match.any(dim=1)


def sums_of(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed `loss` and hits by place, float32 [NUM_SUMS]. For `logits` and `targets` see `hits`."""
    by_place = _matches(logits, targets).sum(dim=0, dtype=torch.float32)
    if len(by_place) < _PLACES:
        by_place = F.pad(by_place, (0, _PLACES - len(by_place)))
    return torch.cat([loss.float().unsqueeze(0), by_place])


def _matches(logits: Tensor, targets: Tensor) -> Tensor:
    # bool [n, min(5, classes)]: whether the target has the highest logit, the second, ... the fifth
    return logits.topk(min(_PLACES, logits.shape[1]), dim=1).indices == targets.unsqueeze(1)
