"""A task: what a model is trained for, as a value of plain functions of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hvd_train.data.trees import Tree
from hvd_train.errors import UsageError
from hvd_train.progress import figures as names
from hvd_train.progress.figures import LOSS, Figure, Sums

Outputs = Any
"""Whatever `Task.forward` returns: as a rule what the model does."""
Loss = Callable[[Outputs, Tree], Tensor]
"""Returns the loss of each sample, [n], for the outputs and targets of n samples."""
Measures = Callable[[Outputs, Tree], Mapping[str, Tensor]]
"""Returns by name what is measured of each sample, [n] or [n, ...], for the outputs and targets of n samples."""


def nothing(outputs: Outputs, targets: Tree) -> Mapping[str, Tensor]:
    """Measure nothing."""
    return {}


def call(model: nn.Module, inputs: Tree) -> Outputs:
    """Return what the model makes of inputs: a tuple or list of them are its arguments, a dict those by name."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return model(*inputs)
    return model(inputs)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model is trained for.

    All that is measured is a sum over samples, so that it does not depend on the number of ranks. Raises UsageError
    where names are taken or `best` is no figure with an order.
    """

    loss: Loss
    """The loss of each sample in training, [n]; the step follows the gradient of its mean."""
    evaluated_loss: Loss | None = None
    """The loss of each sample in evaluations; None: the same one."""
    measures: Measures = nothing
    """What is measured beside the loss, in training and in evaluations."""
    evaluated_measures: Measures = nothing
    """What is measured in evaluations besides, where it would be too much in each step (a confusion matrix)."""
    stored: Measures = nothing
    """What evaluations keep of each sample, for figures that are no function of sums over samples."""
    figures: Sequence[Figure] = ()
    """What is reported beside the mean loss. A figure takes the sums of measures by name, and, in an evaluation, what
    was stored: an array with one row for each sample of the set, in order."""
    best: str = "loss"
    """The figure that decides which weights are the best ones, and what --patience waits for."""
    per_class: Callable[[Sums, int], Mapping[str, float]] | None = None
    """Returns a figure for each class by its name, in an evaluation; NaN for a class without samples."""
    per_class_title: str = ""
    """What the figures of `per_class` are called."""
    per_class_form: str = ".2%"
    """How they are written, as `Figure.form`."""
    forward: Callable[[nn.Module, Tree], Outputs] = call
    """Passes inputs through the model."""
    refusal: Callable[[Outputs, Tree], str | None] = lambda outputs, targets: None
    """Says what a model must return where these outputs do not go with these targets, else None."""
    outputs: int | None = None
    """The argument that a function gets which makes the model, as the number of classes; None: it gets none."""
    modules: Sequence[nn.Module] = ()
    """Other networks that `forward` uses and nothing trains, such as a teacher: they are moved to the device of the
    model and stay in evaluation mode, and no checkpoint holds them."""
    collate: Callable[[list[Any]], tuple[Tree, Tree]] | None = None
    """Makes (inputs, targets) of a list of items where torch's `default_collate` does not, as for samples of different
    lengths. Loader processes call it, so it stands in a module."""
    images_of_classes: bool = False
    """Whether inputs are images and targets the numbers of classes: what mixup, cutmix and augmentation are for."""

    def __post_init__(self) -> None:
        names.check(self.all_figures)
        self.figure(self.best)

    @property
    def all_figures(self) -> tuple[Figure, ...]:
        """The figures with the mean loss, which comes first."""
        return (LOSS, *self.figures)

    def figure(self, name: str) -> Figure:
        """Return the figure of this name. Raises UsageError where there is none, or where it has no order."""
        found = next((figure for figure in self.all_figures if figure.name == name), None)
        if found is None or found.better is None:
            known = ", ".join(figure.name for figure in self.all_figures if figure.better)
            why = "has no order: say which values are better" if found else "is no figure of the task"
            raise UsageError(f"{name} {why}; those that can decide which weights are the best: {known}")
        return found
