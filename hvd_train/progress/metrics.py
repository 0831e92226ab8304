"""Exact sums of what a task measures: they add up over slots, ranks and steps, and are divided once at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Totals:
    """Sums over `count` samples: first that of the losses, then those of the task's measures, in the meter's order."""

    sums: tuple[float, ...] = ()
    """Empty where nothing has been added up yet."""
    count: int = 0

    @property
    def loss(self) -> float:
        """The sum of the losses."""
        return self.sums[0] if self.sums else 0.0

    def __add__(self, other: Totals) -> Totals:
        if not (self.sums and other.sums):
            return Totals(self.sums or other.sums, self.count + other.count)
        return Totals(tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)), self.count + other.count)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Totals:
        """Return the totals in a checkpoint; those of old have the hits at the first place and at the first five."""
        if "top1" in values:
            loss, top1, top5 = values["loss"], values["top1"], values["top5"]
            return cls((loss, top1, top5 - top1, 0.0, 0.0, 0.0), values["count"])
        return cls(tuple(values["sums"]), values["count"])
