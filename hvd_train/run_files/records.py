"""What training reports about itself, as plain values: a step, an epoch, and the moment that a display shows.

What of it people plot are `Numbers`, each under the name that TensorBoard and the like show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeGuard

from hvd_train.progress.clock import WORK
from hvd_train.progress.figures import Shown

_LARGEST = 1e9  # no step takes as many seconds, and no world has as many ranks


@dataclass(frozen=True)
class StepRecord:
    """A training step as metrics.jsonl has it; the speed is that of all ranks together."""

    epoch: int
    """The epoch that the step belongs to, counted from 1."""
    step: int
    """The number of the step in the whole run, counted from 1."""
    samples: int
    """The samples that the run has taken up to and including this step."""
    scores: Mapping[str, float]
    """The task's figures over the global batch, by name: in a line of metrics.jsonl they stand beside the rest."""
    learning_rate: float
    gradient_norm: float | None
    loss_scale: float | None
    """The factor on the loss of a float16 run; None where gradients are not scaled."""
    skipped_steps: int
    """The steps since the run began whose loss or gradient was not finite."""
    images_per_second: float
    split: Mapping[str, float] | None
    """Mean seconds that rank 0 spent in each phase of a step (clock.PHASES) since the last record."""
    ranks: Mapping[str, Sequence[float]] | None = None
    """How far the ranks are apart in each phase and in their own work (`slow_ranks.spread`); None for one rank."""

    def line(self) -> dict[str, Any]:
        """Return the record as a line of metrics.jsonl has it."""
        return _line(self)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> StepRecord:
        """Return the record in a checkpoint; those of old have figures beside the rest."""
        return cls(**_with_scores(cls, values))


@dataclass(frozen=True)
class EpochRecord:
    """An epoch as metrics.jsonl has it, counted from 1."""

    epoch: int
    step: int
    """The number of its last step."""
    scores: Mapping[str, float | None]
    """The task's figures over the epoch by name, and with `val_` before it those of the evaluation: None without."""
    images_per_second: float
    usage: Mapping[str, float] | None = None
    """What rank 0 takes of its machine (`network.usage`); None in records of old."""
    seconds: float | None = None
    """The time that its training and evaluation took, over all starts; None in records of old."""

    def line(self) -> dict[str, Any]:
        """Return the record as a line of metrics.jsonl has it."""
        return _line(self)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> EpochRecord:
        """Return the record in a checkpoint; those of old have figures beside the rest."""
        return cls(**_with_scores(cls, values))


@dataclass(frozen=True)
class Plan:
    """What a training is to do, and how people see it."""

    epochs: int = 0
    samples_per_epoch: int = 0
    shown: Sequence[Shown] = ()
    """The figures to show."""
    unit: str = "images"
    """What people call several samples."""
    figures: Sequence[str] = ()
    """The names of all that is measured."""
    most_samples: int | None = None
    """After so many samples in all it ends in any case."""
    seconds_left: float | None = None
    """After so many seconds more it ends in any case."""

    @property
    def samples(self) -> int:
        """How many samples it takes in all."""
        total = self.epochs * self.samples_per_epoch
        return total if self.most_samples is None else min(total, self.most_samples)


@dataclass(frozen=True)
class Moment:
    """How far training is right now, for the display only."""

    epoch: int
    """Epochs that are finished."""
    cursor: int
    """Samples of the current epoch that have been taken."""
    step: int
    """Steps that the run has done."""
    scores: Callable[[], Mapping[str, float]]
    """Returns the task's figures over the current epoch so far: most moments are shown to nobody."""
    images_per_second: float


@dataclass(frozen=True)
class Numbers:
    """What belongs together of the numbers of a step, for people to plot."""

    kind: Literal["step", "epoch", "world", "end"]
    """What they are of: a step, the evaluation after an epoch, a change of world, or the whole run."""
    step: int
    epoch: int | None
    """Counted from 1; None where they are of no epoch."""
    time: float
    """When they were known, in seconds since 1970."""
    values: Mapping[str, float]
    """By name, as in train/loss and val/top1; they may be NaN or infinite."""


@dataclass(frozen=True)
class Ending:
    """How a training has ended, and its last numbers by name, as in best/top1 and test/loss."""

    how: Literal["finished", "stopped", "failed"]
    scores: Mapping[str, float] = field(default_factory=dict)


def numbers_of(line: Mapping[str, Any]) -> Numbers | None:
    """Return what is plotted of a line of metrics.jsonl; None where that is nothing, or the line is none of ours."""
    kind: Literal["step", "epoch", "world"]
    step, epoch, time = line.get("step"), line.get("epoch"), line.get("time")
    if line.get("kind") == "step":
        kind = "step"
        split = line.get("split")
        seconds = {f"seconds/{phase}": value for phase, value in split.items()} if isinstance(split, Mapping) else {}
        values = {f"train/{name}": value for name, value in line.items() if name not in NOT_PLOTTED} | seconds
        values |= _of_ranks(line)
    elif line.get("kind") == "epoch":
        kind = "epoch"
        values = {name.replace("_", "/", 1): value for name, value in line.items() if name.startswith("val_")}
        usage = line.get("usage")
        values |= {f"usage/{name}": value for name, value in usage.items()} if isinstance(usage, Mapping) else {}
    elif line.get("kind") == "event" and line.get("name") == "world":
        kind, values = "world", {name: line.get(of) for name, of in OF_WORLD.items()}
    else:
        return None
    known = {name: value for name, value in values.items() if _is_number(value)}
    if not known or type(step) is not int or not _is_number(time):
        return None
    return Numbers(kind, step, epoch if type(epoch) is int else None, time, known)


NOT_PLOTTED = {"kind", "time", "epoch", "step", "samples", "split", "ranks"}
"""What else stands in the line of a step."""
OF_RANKS = "ranks/slowest", "ranks/spread"
"""Which rank has the longest own work, and how many times as long as the median of the others."""
OF_WORLD = {"world/size": "world_size", "world/seconds_to_next_step": "seconds"}
"""The numbers of a change of world, and what they are called in its line."""


@dataclass(frozen=True)
class Spread:
    """How far the ranks are apart in something that each does in every step, in seconds."""

    least: float
    median: float
    """That of the ranks but the slowest one."""
    most: float
    slowest: int
    """The rank with the most."""


def spreads_of(line: Mapping[str, Any]) -> dict[str, Spread]:
    """Return by its name what the line of a step says of all ranks, as far as it does; what else it has is left out."""
    of_ranks = line.get("ranks")
    return {
        str(name): Spread(*values)
        for name, values in (of_ranks.items() if isinstance(of_ranks, Mapping) else ())
        if isinstance(values, (list, tuple))
        and len(values) == len(fields(Spread))
        and all(_is_number(value) and 0 <= value < _LARGEST for value in values)
        and type(values[-1]) is int
    }


def _of_ranks(line: Mapping[str, Any]) -> dict[str, float]:
    work = spreads_of(line).get(WORK)
    return dict(zip(OF_RANKS, (work.slowest, work.most / work.median), strict=True)) if work and work.median else {}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _line(record: StepRecord | EpochRecord) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in vars(record).items():
        values |= value if name == "scores" else {name: value}
    return values


def _with_scores(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    own = {field.name for field in dataclasses.fields(cls)}
    if "scores" in values:
        return dict(values)
    scores = {name: value for name, value in values.items() if name not in own}
    return {**{name: value for name, value in values.items() if name in own}, "scores": scores}
