"""The figures of tasks, for models that are given: in an evaluation, and as a step shows them."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn

from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.dataset import Arrays
from hvd_train.data.prepare import AsTheyAre
from hvd_train.data.trees import Tree
from hvd_train.progress.metrics import Totals
from hvd_train.tasks.meter import Meter
from hvd_train.tasks.task import Task
from hvd_train.validate import Scores, evaluate
from hvd_train.world.world import LocalWorld
from tests.support.batches import CPU


def scored(task: Task, outputs: Tensor, targets: Tree) -> Scores:
    """The scores of a model that has these outputs, in passes of four samples."""
    count = len(outputs)
    meter = Meter.of(task, outputs, targets, count)
    loader = ArrayLoader(Arrays(outputs, targets, count), AsTheyAre(), CPU, seed=0)
    return evaluate(nn.Identity(), loader, LocalWorld(), micro_batch=4, meter=meter, device=CPU, autocast=nullcontext())


def in_training(task: Task, outputs: Tensor, targets: Tree) -> dict[str, float]:
    """The figures that a step shows which takes the samples in slots of three."""
    meter, total = Meter.of(task, outputs, targets, len(outputs)), Totals()
    for begin in range(0, len(outputs), 3):
        rows = slice(begin, begin + 3)
        losses = meter.losses(outputs[rows], targets[rows], len(outputs[rows]))
        sums = meter.sums(losses, outputs[rows], targets[rows])
        total += Totals(tuple(sums.tolist()), len(losses))
    return meter.figures(total)
