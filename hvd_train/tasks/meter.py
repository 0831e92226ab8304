"""What a task measures of micro-batches, added up in one row of numbers that can travel and be read again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_train.data.trees import Tree
from hvd_train.errors import UsageError
from hvd_train.progress.figures import Figure, Sums
from hvd_train.progress.metrics import Totals
from hvd_train.tasks.task import Loss, Measures, Outputs, Task


class Row:
    """Sums of the loss and of measures over samples, side by side: where each one lies in a row of numbers."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes` are those of each measure for one sample, by name."""
        self._shapes = {"loss": (), **shapes}
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self.size = sum(self._sizes)
        self.names = [*shapes]
        """The names of the measures beside the loss."""

    def of(self, losses: Tensor, measures: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the sums over n samples, [size]. Raises UsageError for measures of other names or shapes.

        `losses` are [n], `measures` those of the samples.
        """
        count = len(losses)
        names = self.names
        if len(names) != len(measures) or any(name not in measures for name in names):
            raise UsageError(
                f"the measures changed their names: first {_listed(names)}, then {_listed([*measures])}; "
                "give the same ones for every batch"
            )
        for name, measure in measures.items():
            if measure.shape != (count, *self._shapes[name]):
                raise UsageError(
                    f"the measure {name} changed its shape: first [n{_inside(self._shapes[name])}], "
                    f"then {list(measure.shape)} for {count} samples"
                )
        parts = zip((measures[name] for name in names), self._sizes[1:], strict=True)
        columns = [losses.unsqueeze(1), *(measure.reshape(count, size) for measure, size in parts)]
        return torch.cat([column.to(dtype) for column in columns], dim=1).sum(0)

    def read(self, numbers: Sequence[float]) -> dict[str, npt.NDArray[np.float64]]:
        """Return the sums in a row of numbers, by name."""
        whole, sums, begin = np.asarray(numbers, dtype=np.float64), {}, 0
        for (name, shape), size in zip(self._shapes.items(), self._sizes, strict=True):
            sums[name] = whole[begin : begin + size].reshape(shape)
            begin += size
        return sums

    def not_finite(self, numbers: Sequence[float]) -> str | None:
        """Return the name of the first measure whose sum is not finite, or None."""
        if math.isfinite(sum(numbers)):
            return None
        found = (name for name, values in self.read(numbers).items() if not np.isfinite(values).all())
        return next(found, None)


class Meter:
    """Measures a task: in training, where sums travel with the gradients, and in evaluations."""

    def __init__(self, task: Task, training: Row, evaluation: Row, stored: Mapping[str, tuple[int, ...]]) -> None:
        """`stored` are the shapes of what is kept of each sample in an evaluation, by name."""
        self.task, self.training, self.evaluation, self.stored = task, training, evaluation, stored

    @classmethod
    def of(cls, task: Task, outputs: Outputs, targets: Tree, count: int) -> Meter:
        """Return the meter of a task whose measures have the shapes that those of `count` samples have.

        Raises UsageError where its loss or its measures are not as a task's must be.
        """
        _losses(task.loss, outputs, targets, count)
        _losses(task.evaluated_loss or task.loss, outputs, targets, count)
        in_training, more, stored = (
            {name: tuple(measure.shape[1:]) for name, measure in _measured(measures, outputs, targets, count).items()}
            for measures in (task.measures, task.evaluated_measures, task.stored)
        )
        if twice := (in_training.keys() & more.keys()) | (stored.keys() & (in_training.keys() | more.keys())):
            raise UsageError(f"the task measures {_listed(sorted(twice))} twice: each name stands for one measure")
        meter = cls(task, Row(in_training), Row({**in_training, **more}), stored)
        meter._try_figures()
        return meter

    def losses(self, outputs: Outputs, targets: Tree, count: int) -> Tensor:
        """Return the losses of `count` samples in training, [n]. Raises UsageError where they are something else."""
        return _losses(self.task.loss, outputs, targets, count)

    def sums(self, losses: Tensor, outputs: Outputs, targets: Tree) -> Tensor:
        """Return the sums of losses [n] and measures over the samples of a slot in training, float32."""
        return self.training.of(losses, self.task.measures(outputs, targets), torch.float32)

    def evaluated_losses(self, outputs: Outputs, targets: Tree, count: int) -> Tensor:
        """Return the losses of `count` samples in an evaluation, [n]. Raises UsageError where they are others."""
        return _losses(self.task.evaluated_loss or self.task.loss, outputs, targets, count)

    def evaluated_sums(self, outputs: Outputs, targets: Tree, count: int) -> Tensor:
        """Return the sums of losses and measures over `count` samples of an evaluation, float64."""
        losses = self.evaluated_losses(outputs, targets, count)
        measures = {**self.task.measures(outputs, targets), **self.task.evaluated_measures(outputs, targets)}
        return self.evaluation.of(losses, measures, torch.float64)

    def figures(self, totals: Totals) -> dict[str, float]:
        """Return the figures of training by name; NaN over no samples."""
        wanted = [figure for figure in self.task.all_figures if figure.in_training]
        if not totals.count:
            return {figure.name: math.nan for figure in wanted}
        sums = self.training.read(totals.sums)
        return {figure.name: number_of(figure, sums, totals.count) for figure in wanted}

    def _try_figures(self) -> None:
        """Raise UsageError for a figure that cannot be computed of the measures there are."""
        sums = {name: np.ones(shape) for name, shape in self.evaluation._shapes.items()}
        table = {name: np.ones((1, *shape)) for name, shape in self.stored.items()}
        for figure in self.task.all_figures:
            seen = self.training.read([1.0] * self.training.size) if figure.in_training else {**sums, **table}
            try:
                float(figure.value(seen, 1))
            except ArithmeticError:
                continue
            except KeyError as error:
                raise UsageError(
                    f"the figure {figure.name} of the task needs {error}, which is not among what is measured "
                    f"{'in training' if figure.in_training else 'in evaluations'}: {_listed(list(seen))}"
                ) from None
        if self.task.per_class is not None:
            try:
                self.task.per_class({**sums, **table}, 1)
            except ArithmeticError:
                pass
            except KeyError as error:
                raise UsageError(
                    f"the task's figure of each class needs {error}, which is not among what is measured in "
                    f"evaluations: {_listed([*sums, *table])}"
                ) from None


def number_of(figure: Figure, sums: Sums, count: int) -> float:
    """Return the value of a figure as a plain float; NaN where it has none, such as a share of nothing."""
    try:
        return float(figure.value(sums, count))
    except ArithmeticError:
        return math.nan


def _losses(loss: Loss, outputs: Outputs, targets: Tree, count: int) -> Tensor:
    found = loss(outputs, targets)
    if not isinstance(found, Tensor) or found.shape != (count,):
        got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        hint = "; leave out the mean over samples, as with reduction='none'" if getattr(found, "ndim", 1) == 0 else ""
        raise UsageError(f"the loss of the task is of {got}; return one for each sample, [{count}]{hint}")
    return found


def _measured(measures: Measures, outputs: Outputs, targets: Tree, count: int) -> Mapping[str, Tensor]:
    found = measures(outputs, targets)
    if not isinstance(found, Mapping) or not all(isinstance(measure, Tensor) for measure in found.values()):
        raise UsageError("the measures of the task must be a dict of tensors, by name")
    for name, measure in found.items():
        if name in ("loss", "count"):
            raise UsageError(f"a measure of the task is called {name}, which is the trainer's: choose another name")
        if measure.ndim == 0 or len(measure) != count:
            shape = list(measure.shape)
            raise UsageError(
                f"the measure {name} of the task is of shape {shape}; return one for each sample, [{count}]"
            )
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _inside(shape: tuple[int, ...]) -> str:
    return "".join(f", {size}" for size in shape)
