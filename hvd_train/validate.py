"""Exact evaluation: every sample counts once, whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hvd_train.data.batches import Loader
from hvd_train.network.buffers import unchanged
from hvd_train.network.memory import enough_for
from hvd_train.progress.figures import Shown
from hvd_train.progress.order import Cut, InSequence, Share, assignments
from hvd_train.progress.whereabouts import here
from hvd_train.tasks.meter import Meter, number_of
from hvd_train.world.world import World


@dataclass(frozen=True)
class Scores:
    """The figures of a task over `count` samples, by name, and one of each class (NaN: no samples) if there is one.

    `scores["loss"]` is the mean loss; classification has `top1` and `top5`, shares of 1, and top-1 of each class.
    """

    values: Mapping[str, float]
    count: int
    shown: tuple[Shown, ...] = field(repr=False, compare=False)
    """How people read the figures, in their order."""
    per_class: Mapping[str, float] = field(default_factory=dict)
    per_class_title: str = ""
    per_class_form: str = ".2%"

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON; what is no number is None."""
        per_class = {name: _known(value) for name, value in self.per_class.items()}
        return {**{name: _known(value) for name, value in self.values.items()}, "count": self.count} | (
            {"per_class": per_class} if per_class else {}
        )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    world: World,
    *,
    micro_batch: int,
    meter: Meter,
    device: torch.device,
    autocast: AbstractContextManager[object],
    share: Share | None = None,
    most_passes: int | None = None,
) -> Scores:
    """Return the scores of the model in evaluation mode over the whole set of `loader`, the same on every rank.

    The set is cut into the same micro-batches of `micro_batch` samples for every world size, which the ranks take in
    turn, or those that compute according to `share`; sums are float64. With `most_passes` only so many micro-batches
    are taken, the first ones. The model and its buffers are as before
    afterwards. Raises RankLost where a rank is gone, OutOfMemory where memory does not suffice, and UsageError where
    the task's measures are not what they were.
    """
    here.at("evaluation")
    modes = [(module, module.training) for module in model.modules()]  # a frozen layer may not be training
    model.eval()
    share = share or Share(world.place.rank, world.place.size)
    cut = Cut(micro_batch * share.ranks, micro_batch)
    num_samples = loader.num_samples if most_passes is None else min(loader.num_samples, most_passes * micro_batch)
    work = assignments(InSequence(num_samples), 0, cut, share.number, share.ranks)
    task, row = meter.task, meter.evaluation
    sums = torch.zeros(row.size + 1, dtype=torch.float64, device=device)
    tables = {name: torch.zeros(num_samples, *shape) for name, shape in meter.stored.items()}
    doing = f"with {micro_batch} samples in a pass of an evaluation"
    todo = f"type --eval-batch-size {max(1, micro_batch // 2)}: the scores are the same"
    with unchanged(model), enough_for(doing, device, todo):
        for micro in (micro for batch in loader.load(0, work) for micro in batch.micro_batches):
            count = len(micro.samples)
            here.at("evaluation")  # anew for each pass: it moves on
            with autocast:
                outputs = task.forward(model, micro.inputs)
                sums[:-1] += meter.evaluated_sums(outputs, micro.targets, count)
                for name, values in task.stored(outputs, micro.targets).items():
                    tables[name][torch.from_numpy(micro.samples)] = values.float().cpu()
            sums[-1] += count
    for module, training in modes:
        module.training = training
    *numbers, total = world.sum(sums, "evaluation").tolist()
    known = {name: _whole(world, table, device).numpy() for name, table in tables.items()}
    of_all, count = {**row.read(numbers), **known}, int(total)
    of_classes = {} if task.per_class is None or not count else task.per_class(of_all, count)
    return Scores(
        {figure.name: number_of(figure, of_all, count) if count else math.nan for figure in task.all_figures},
        count,
        tuple(figure.as_shown() for figure in task.all_figures),
        {str(name): float(value) for name, value in of_classes.items()},
        task.per_class_title,
        task.per_class_form,
    )


def _whole(world: World, table: Tensor, device: torch.device) -> Tensor:
    """Return the table with the rows of all ranks: each has those of its own samples, and zeros for all others."""
    return world.sum(table.to(device), "evaluation").cpu()
