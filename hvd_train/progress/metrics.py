"""Sum named measures exactly, and divide once at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# What a line of metrics.jsonl has besides measures.
FACTS = {
    "kind",
    "time",
    "epoch",
    "step",
    "samples",
    "learning_rate",
    "gradient_norm",
    "loss_scale",
    "skipped_steps",
    "samples_per_second",
    "seconds",
    "total_seconds",
    "peak_memory_gib",
    "gpu",
    "split",
    "ranks",
    # which `History` adds
    "elapsed",
    "samples_done",
    "epochs_done",
}


@dataclass(frozen=True)
class Totals:
    """Sums of named measures over `count` samples."""

    count: int = 0
    sums: Mapping[str, float] = field(default_factory=dict)
    divisors: Mapping[str, float] = field(default_factory=dict)  # of each sum, by the same names

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.count + other.count,
            _added(self.sums, other.sums),
            _added(self.divisors, other.divisors),
        )

    def means(self) -> dict[str, float]:
        """Return the mean of each measure by name; NaN if there is nothing to divide by."""
        return {
            name: total / self.divisors[name] if self.divisors[name] else math.nan
            for name, total in self.sums.items()
        }


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {**one, **{name: one.get(name, 0.0) + value for name, value in other.items()}}
