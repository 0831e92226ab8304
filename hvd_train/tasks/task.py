"""A task, the measures that it returns and their sums, the scores of an evaluation,
and the goals of a training.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hvd_train.config import ScheduleConfig
from hvd_train.data.trees import form_of
from hvd_train.errors import UsageError, first_few
from hvd_train.progress.metrics import FACTS, Totals
from hvd_train.progress.order import Indices

LOSS = "loss"


@dataclass(slots=True)
class Mean:
    """A total divided by a count; both are summed over all micro-batches and
    ranks before the division.

    `total` has one element. `count` is, for instance, the number of tokens without padding; by
    default it is the number of samples.
    """

    total: Tensor
    count: Tensor | int | None = None

    def __add__(self, other: Mean | Tensor) -> SumOfMeans:
        """Return a loss of several terms; a tensor has one number for each sample."""
        return SumOfMeans((self,)) + other

    __radd__ = __add__


@dataclass(slots=True)
class SumOfMeans:
    """A loss of several terms, each divided by its own count: what `Mean` + `Mean` returns."""

    terms: tuple[Mean, ...]

    def __add__(self, other: SumOfMeans | Mean | Tensor) -> SumOfMeans:
        """Return this loss with more terms."""
        if isinstance(other, SumOfMeans):
            return SumOfMeans(self.terms + other.terms)
        mean = other if isinstance(other, Mean) else Mean(other.sum())
        return SumOfMeans((*self.terms, mean))

    __radd__ = __add__


@dataclass(slots=True)
class Total:
    """Values that are summed elementwise, such as a confusion matrix: in an evaluation, or
    in a step of your own loop.

    `hvd-train train` ignores them in training.
    """

    values: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        return self.values.shape


@dataclass(slots=True)
class Each:
    """Values of each sample [n, ...]: for average precision and such in an evaluation,
    for queues in your own loop.

    They are kept as float32, in the order of the set, or of the samples of the step. `hvd-train
    train` ignores them in training.
    """

    values: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        return self.values.shape


Measure = Tensor | Mean | SumOfMeans | Total | Each
"""A tensor has one number (or a bool) for each sample: the measure is its mean."""
Measures = Mapping[str, Measure]
Function = Callable[[nn.Module, Any], Measures]
"""Computes the measures of a micro-batch: of a model, and a batch on the device of the rank."""


@dataclass(frozen=True)
class Scores(Mapping[str, float]):
    """The figures of an evaluation by name: means over all samples, and the task's summary."""

    figures: Mapping[str, float]
    count: int  # samples
    # each `Total` of the task, float64 on the CPU
    totals: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Tensor] | None = field(
        default_factory=dict
    )  # each `Each`, float32 on the CPU; None: not any more
    # a figure of each class (NaN: no samples), if any
    per_class: Mapping[str, float] = field(default_factory=dict)
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
        """Return an `Each` of the task, [samples, ...] in the order of the set.

        Raises UsageError if the evaluation was before the job resumed: checkpoints have none.
        """
        if self.kept is None:
            raise UsageError(
                f"scores.each({name!r}): this evaluation was before the job resumed, and "
                "checkpoints have no values of Each: evaluate after the steps of an epoch, or "
                "use a Mean or a Total"
            )
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

    `measure(model, batch)` returns measures by name for a micro-batch; training minimises the one
    named "loss". `evaluate` is what evaluations measure, if it is not the same. `summary` returns
    more figures of the scores of a whole evaluation, from sums such as a confusion matrix.
    `collate` makes a batch of a list of items, by default as torch does. `best` names the figure
    that decides which weights are the best, and `higher` says whether more of it is better.
    """

    measure: Function
    evaluate: Function | None = None
    summary: Callable[[Scores], Mapping[str, float]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    best: str = LOSS
    higher: bool = False
    # modules that are not trained, such as a teacher; equal on all ranks
    constants: Sequence[nn.Module] = ()
    sample: str = "sample"  # the name of a sample for the user: "image" gives "1,234 images/s"
    # a figure of each class, for `hvd-train evaluate`
    per_class: Callable[[Scores], Mapping[str, float]] | None = None
    # Called with each batch while it is in host memory, and the numbers of its samples; it may
    # raise UsageError.
    check: Callable[[Any, Indices], None] | None = None


@dataclass(frozen=True)
class Goal:
    """A figure of evaluations and whether more of it is better."""

    name: str
    higher: bool

    def better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another; any number is better than NaN."""
        return math.isnan(other) or (value > other if self.higher else value < other)


def goal_of(task: Task, name: str | None, flag: str) -> Goal:
    """Return the goal of a figure, by default the task's best one.

    Raises UsageError that names the flag.
    """
    if name not in (None, task.best, LOSS):
        known = " or ".join(dict.fromkeys([task.best, LOSS]))
        raise UsageError(f"{flag} {name}: it must be {known} for this task")
    return Goal(name or task.best, higher=task.higher and name in (None, task.best))


def targets_of(task: Task, schedule: ScheduleConfig) -> dict[Goal, float]:
    """Return the goal at which a training ends, with its value, if there is one.

    Raises UsageError for an unknown one.
    """
    if schedule.target is None:
        return {}
    name, _, value = schedule.target.partition("=")
    return {goal_of(task, name, "--target"): float(value)}


@dataclass(frozen=True)
class Field:
    """The place of a measure among the summed numbers."""

    name: str
    # A sum divided by the samples, a sum and what divides it, a `Total`, or an `Each`, which is not
    # summed.
    kind: Literal["samples", "count", "total", "each"]
    shape: tuple[int, ...] = ()

    @property
    def is_mean(self) -> bool:
        """Return whether the measure is a mean."""
        return self.kind in ("samples", "count")

    @property
    def size(self) -> int:
        """Return how many numbers it takes."""
        return {"count": 2, "each": 0}.get(self.kind, math.prod(self.shape))


class Measuring:
    """A function of a task, whose measures have the same fields for each micro-batch.

    The first measures decide; they need a loss if `trains`.
    """

    def __init__(self, function: Function, *, trains: bool = True, of_a_loop: bool = False) -> None:
        """`of_a_loop`: the user's own loop measures, which can use totals and values
        of each sample in training.
        """
        self.function = function
        self._trains = trains
        self._checked = list[object]()
        self.of_a_loop = of_a_loop
        # the power of two near the count of the loss for each sample, as far as it is known
        self.exponent = 0
        self.fields = self.means = tuple[Field, ...]()  # training sums the means
        self.terms = tuple[Field, ...]()  # of the loss: one, unless it is a sum of means
        self.num_sums = 0
        self.num_of_loss = 0  # of the summed numbers
        self.counts_at = list[
            int | None
        ]()  # the place of each term's count among them; None: it is that of the samples
        self.dtype = torch.float32  # of the sums of a training: float64 if the loss is

    @property
    def keeps(self) -> bool:
        """Whether steps sum totals and keep values of each sample."""
        return self.of_a_loop and len(self.fields) > len(self.means)

    def expect(self, count: float) -> None:
        """Expect a count of the loss near this one for each sample."""
        self.exponent = nearest_exponent(count)

    def __call__(self, model: nn.Module, batch: Any, num_samples: int) -> Measures:
        """Return the measures of a micro-batch. Raises UsageError if their fields are others."""
        return self.checked(self.function(model, batch), num_samples)

    def checked(self, measures: Measures, num_samples: int) -> Measures:
        """Return these measures of a micro-batch, each term of a loss apart.

        Raises UsageError for other fields.
        """
        if isinstance(measures, Mapping) and isinstance(loss := measures.get(LOSS), SumOfMeans):
            measures = {
                **measures,
                **{_name_of_term(number): term for number, term in enumerate(loss.terms)},
            }
        items = measures.items() if isinstance(measures, Mapping) else ()
        form: list[object] = [
            (name, type(measure), getattr(measure, "shape", None)) for name, measure in items
        ]
        form.append(num_samples)
        if form != self._checked:  # a full check takes as long as a small layer
            found = fields_of(measures, num_samples, trains=self._trains)
            if not self.fields:
                self.fields = found
                self.means = tuple(field for field in found if field.is_mean)
                self.terms = tuple(field for field in found if _is_of_loss(field.name))
                ends = itertools.accumulate(field.size for field in self.terms)
                self.counts_at = [
                    end - 1 if field.kind == "count" else None
                    for field, end in zip(self.terms, ends, strict=True)
                ]
                self.num_of_loss = sum(field.size for field in self.terms)
                self.num_sums = sum(field.size for field in self.means)
                if LOSS in measures and sum_of(measures[LOSS]).dtype == torch.float64:
                    self.dtype = torch.float64
            if odd := {*found} ^ {*self.fields}:
                names = first_few(sorted({field.name for field in odd}), 3)
                raise UsageError(
                    f"there are other measures for one micro-batch than for another: {names}"
                )
            self._checked = form
        return measures


def nearest_exponent(value: float) -> int:
    """Return the exponent of the power of two that is the nearest to a positive number."""
    return round(math.log2(value))


def fields_of(measures: Measures, num_samples: int, *, trains: bool = True) -> tuple[Field, ...]:
    """Return the fields of the measures of `num_samples` samples: the loss first, totals last.

    Raises UsageError.
    """
    if not isinstance(measures, Mapping) or not measures or (trains and LOSS not in measures):
        raise UsageError(
            f"the task returned {form_of(measures)}: return a dict of measures with a {LOSS!r}"
        )
    fields = [_field(name, measure, num_samples) for name, measure in measures.items()]
    return tuple(sorted(fields, key=lambda field: (not _is_of_loss(field.name), not field.is_mean)))


def _name_of_term(number: int) -> str:
    """Return the name of a term of the loss among measures; the first is the loss."""
    return f"{LOSS}+{number}" if number else LOSS


def _is_of_loss(name: object) -> bool:
    return isinstance(name, str) and name.partition("+")[0] == LOSS


def _field(name: str, measure: Measure, num_samples: int) -> Field:
    is_free = isinstance(name, str) and name.isidentifier() and name not in FACTS
    if not _is_of_loss(name) and (not is_free or name.startswith("val_")):
        raise UsageError(
            f"there is a measure named {name!r}: take another name, of letters, digits and _"
        )
    match measure:
        case Tensor() if measure.shape == (num_samples,):
            return Field(name, "samples")
        case Mean(Tensor() as total, count) if total.numel() == 1:
            if not isinstance(count, Tensor) or count.numel() == 1:
                return Field(name, "samples" if count is None else "count")
        case Each(values) if name != LOSS and values.shape[:1] == (num_samples,):
            return Field(name, "each", tuple(values.shape[1:]))
        case Total(values) if name != LOSS:
            return Field(name, "total", tuple(values.shape))
    raise UsageError(
        f"the measure {name!r} is {form_of(measure)} for {num_samples} samples: it needs one "
        "number for each sample (for a loss of torch: reduction='none'), or Mean(total, count) "
        "with one number as total"
    )


def sum_of(measure: Measure) -> Tensor:
    """Return the sum of a measure over its samples, with its gradient: [] for a loss."""
    if isinstance(measure, SumOfMeans):  # as a task returns it
        return reduce(operator.add, [term.total for term in measure.terms])
    if isinstance(measure, Mean):
        return measure.total
    assert isinstance(measure, Tensor)
    return measure.sum()


def numbers_of(measures: Measures, fields: Sequence[Field], dtype: torch.dtype) -> Tensor:
    """Return the sums of the measures in `fields`, without gradients, [sum of
    `Field.size`] of `dtype`.
    """
    numbers: list[Tensor] = []
    totals: list[Tensor] = []
    for place in fields:
        measure = measures[place.name]
        if isinstance(measure, Mean):
            total = measure.total.detach()
            numbers.append(total)
            if measure.count is not None:
                count = torch.as_tensor(measure.count, dtype=dtype, device=total.device)
                numbers.append(count.detach())
        elif isinstance(measure, Tensor):
            numbers.append(measure.detach().sum(dtype=dtype))
        elif isinstance(measure, Total):
            totals.append(measure.values.detach().to(dtype).flatten())
    scalars = [number if number.dim() == 0 else number.view(()) for number in numbers]
    if not scalars:
        return torch.cat(totals) if totals else torch.zeros(0, dtype=dtype)
    of_means = torch.stack(
        [number if number.dtype == dtype else number.to(dtype) for number in scalars]
    )
    return torch.cat([of_means, *totals]) if totals else of_means


def totals_in(measures: Measures) -> dict[str, Tensor]:
    """Return the values of each `Total`, float64 on the CPU."""
    return {
        name: each.values.detach().double().cpu()
        for name, each in measures.items()
        if isinstance(each, Total)
    }


def kept_of(measures: Measures) -> dict[str, Tensor]:
    """Return the values of each `Each`, float32 on the CPU."""
    return {
        name: each.values.detach().float().cpu()
        for name, each in measures.items()
        if isinstance(each, Each)
    }


def totals_of(fields: Sequence[Field], numbers: Sequence[float], count: int) -> Totals:
    """Return the totals of summed numbers of `count` samples, which begin with
    the numbers of these means.
    """
    sums: dict[str, float] = {}
    divisors: dict[str, float] = {}
    at = 0
    for place in fields:
        by_count = place.kind == "count"
        sums[place.name], divisors[place.name] = (
            numbers[at],
            numbers[at + 1] if by_count else float(count),
        )
        at += 1 + by_count
    if len(fields) > 1 and _is_of_loss(fields[1].name):  # the loss comes first
        terms = [name for name in sums if _is_of_loss(name)]
        of_loss = [(sums.pop(name), divisors.pop(name)) for name in terms]
        # as in the step
        loss = count * sum(total / divisor for total, divisor in of_loss if divisor)
        return Totals(count, {LOSS: loss, **sums}, {LOSS: float(count), **divisors})
    return Totals(count, sums, divisors)
