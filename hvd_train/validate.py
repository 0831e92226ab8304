"""Exact evaluation: every sample counts once, for any number of ranks."""

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hvd_train.config import Config
from hvd_train.data.loader import Loader
from hvd_train.data.plain import numbers
from hvd_train.errors import UsageError, first_few
from hvd_train.network.buffers import unchanged
from hvd_train.network.device import autocast
from hvd_train.progress.order import BatchLayout, Order, Owned, assignments
from hvd_train.tasks.task import Field, Measuring, Scores, Task, kept_of, numbers_of, totals_of
from hvd_train.world.world import World

_ROUNDS = 8  # micro-batches of a rank that are dealt at once
# Sums of 2^18 multiples of these powers of two are exact, and so do not depend on their order.
_GRIDS = 2.0**36, 1.0, 2.0**-36, 2.0**-72, 2.0**-108


@torch.no_grad()
def evaluate(
    config: Config,
    device: torch.device,
    task: Task,
    measuring: Measuring,
    model: nn.Module,
    loader: Loader,
    world: World,
    owned: Owned | None = None,
) -> Scores:
    """Return the scores over the set of `loader`, equal on all ranks.

    `measuring` is the task's. Ranks take micro-batches in turn, or the ones that they own. Raises
    RankLost.
    """
    rank = world.place.rank
    size = world.place.size
    micro_batch = config.batch.eval_batch_size
    precision = autocast(config, device)
    # the same micro-batches for every world size
    layout = BatchLayout(micro_batch * size * _ROUNDS, micro_batch)
    work = assignments(Order(loader.num_samples), 0, layout, rank, size, owned=owned)
    with unchanged(model):
        model.eval()
        if not measuring.fields:  # a rank may have no samples
            measuring(model, loader.example(2), 2)
        fields = measuring.fields
        kept = {
            f.name: torch.zeros(loader.num_samples, *f.shape) for f in fields if f.kind == "each"
        }
        # Numbers of micro-batches are added in their order, which gives the same bits on any number
        # of ranks. Totals may be large, so each rank adds up parts of its own, which are exact.
        num_means = sum(field.size for field in fields if field.is_mean)
        rows = torch.zeros(
            math.ceil(loader.num_samples / micro_batch),
            num_means,
            dtype=torch.float64,
            device=device,
        )
        num_totals = sum(field.size for field in fields) - num_means
        totals = torch.zeros(len(_GRIDS), num_totals, dtype=torch.float64, device=device)
        for micro in (micro for batch in loader.load(0, work) for micro in batch.micro_batches):
            with precision:
                measures = measuring(model, micro.batch, len(micro.samples))
            if num_means + num_totals > 0:  # else there are only values of each sample
                measured = numbers_of(measures, fields, torch.float64)
                rows[micro.samples[0] // micro_batch] = measured[:num_means]
                if num_totals > 0:
                    totals += _parts(measured[num_means:])
            for name, values in kept_of(measures).items():
                kept[name][torch.from_numpy(micro.samples)] = values
    # others have zeros there
    kept = {name: world.sum(rows, f"evaluation.{name}") for name, rows in kept.items()}
    if num_means + num_totals > 0:
        summed = world.sum(torch.cat([rows.view(-1), totals.view(-1)]), "evaluation")
        rows = summed[: rows.numel()].view(rows.shape)
        totals = summed[rows.numel() :].view(totals.shape)
    sums = torch.cat([rows.sum(0), totals.sum(0)])
    return scores_of(task, fields, sums.cpu(), loader.num_samples, kept)


def _parts(numbers: Tensor) -> Tensor:
    """Split float64 numbers into multiples of each grid, [grids, n].

    They add up to numbers below 2^89, but for less than 2^-108.
    """
    parts = list[Tensor]()
    for grid in _GRIDS:
        part = (numbers / grid).round() * grid
        parts.append(part)
        numbers = (numbers - part).nan_to_num()  # nothing is left of an infinite number
    return torch.stack(parts)


def scores_of(
    task: Task,
    fields: tuple[Field, ...],
    summed: Tensor,
    count: int,
    kept: Mapping[str, Tensor] | None = None,
) -> Scores:
    """Return the scores of summed numbers of `count` samples.

    Raises UsageError if the task's best is not in them.
    """
    of_fields = zip(fields, torch.split(summed, [field.size for field in fields]), strict=True)
    totals = {
        field.name: part.view(field.shape) for field, part in of_fields if field.kind == "total"
    }
    figures = totals_of(
        [field for field in fields if field.is_mean], summed.tolist(), count
    ).means()
    scores = Scores(figures, count, totals, kept or {})
    if task.summary is not None:
        scores = dataclasses.replace(
            scores, figures={**figures, **numbers(task.summary(scores), "the task's summary")}
        )
    if task.best and task.best not in scores:
        raise UsageError(
            f"the task's best is {task.best!r}, but its evaluation has {first_few(list(scores))}"
        )
    per_class = (
        {} if task.per_class is None else numbers(task.per_class(scores), "the task's per_class")
    )
    return dataclasses.replace(scores, per_class=per_class)
