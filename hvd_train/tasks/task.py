"""A task as a value, the scores of an evaluation, and the goals of a training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hvd_train.config import ScheduleConfig
from hvd_train.errors import UsageError
from hvd_train.tasks.measures import LOSS, Function


@dataclass(frozen=True)
class Scores(Mapping[str, float]):
    """The figures of an evaluation by name: means over all samples, and the task's summary."""

    figures: Mapping[str, float]
    count: int  # samples
    totals: Mapping[str, Tensor] = field(default_factory=dict)  # each `Total` of the task, float64 on the CPU
    kept: Mapping[str, Tensor] = field(default_factory=dict)  # each `Each` of the task, float32 on the CPU
    per_class: Mapping[str, float] = field(default_factory=dict)  # a figure of each class (NaN: no samples), if any
    weights: str = ""  # which weights of a run were evaluated; empty during a training

    def __getitem__(self, name: str) -> float:
        return self.figures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.figures)

    def __len__(self) -> int:
        return len(self.figures)

    def total(self, name: str) -> Tensor:
        """Return a `Total` of the task, summed over all samples."""
        return self.totals[name]

    def each(self, name: str) -> Tensor:
        """Return an `Each` of the task, [samples, ...] in the order of the set."""
        return self.kept[name]

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON, which has no NaN: a class without samples has None."""
        figures, per_class = (
            {name: value if math.isfinite(value) else None for name, value in of.items()}
            for of in (self.figures, self.per_class)
        )
        return {**figures, "count": self.count, "per_class": per_class, "weights": self.weights}


@dataclass(frozen=True)
class Task:
    """What is computed for samples, and which figure of an evaluation decides.

    `measure(model, batch)` returns measures by name for a micro-batch; training minimises the one named "loss".
    `evaluate` is what evaluations measure, if it is not the same. `summary` returns more figures of the scores of a
    whole evaluation, from sums such as a confusion matrix. `collate` makes a batch of a list of items, by default as
    torch does. `best` names the figure that decides which weights are the best, and `higher` says whether more of it is
    better.
    """

    measure: Function
    evaluate: Function | None = None
    summary: Callable[[Scores], Mapping[str, float]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    best: str = LOSS
    higher: bool = False
    constants: Sequence[nn.Module] = ()  # modules that are not trained, such as a teacher; equal on all ranks
    sample: str = "sample"  # the name of a sample for the user: "image" gives "1,234 images/s"
    per_class: Callable[[Scores], Mapping[str, float]] | None = None  # a figure of each class, for `hvd-train evaluate`


@dataclass(frozen=True)
class Goal:
    """A figure of evaluations and whether more of it is better."""

    name: str
    higher: bool

    def better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another; any number is better than NaN."""
        return math.isnan(other) or (value > other if self.higher else value < other)


def goal_of(task: Task, name: str | None, flag: str) -> Goal:
    """Return the goal of a figure, by default the task's best one. Raises UsageError that names the flag."""
    if name not in (None, task.best, LOSS):
        known = " or ".join(dict.fromkeys([task.best, LOSS]))
        raise UsageError(f"{flag} {name}: it must be {known} for this task")
    return Goal(name or task.best, higher=task.higher and name in (None, task.best))


def targets_of(task: Task, schedule: ScheduleConfig) -> dict[Goal, float]:
    """Return the goals at which a training ends, with their values. Raises UsageError for an unknown one."""
    targets = {}
    if schedule.target_accuracy is not None:
        targets[goal_of(task, "top1", "--target-accuracy is --target")] = schedule.target_accuracy
    if schedule.target is not None:
        name, _, value = schedule.target.partition("=")
        targets[goal_of(task, name, "--target")] = float(value)
    return targets
