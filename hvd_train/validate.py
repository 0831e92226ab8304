"""Exact evaluation: every sample counts once, for any number of ranks."""

import dataclasses
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hvd_train.data.loader import Loader
from hvd_train.network.buffers import unchanged
from hvd_train.progress import metrics
from hvd_train.progress.order import BatchLayout, InSequence, assignments
from hvd_train.world.world import World


@dataclass(frozen=True)
class Scores:
    """Mean loss, top-1 and top-5 (shares of 1) over `count` samples, and top-1 of each class (NaN: no samples)."""

    loss: float
    top1: float
    top5: float
    count: int
    classes: tuple[str, ...]
    per_class: tuple[float, ...]
    weights: str = ""  # which weights of a run were evaluated; empty during a training

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON; a class without samples has None."""
        shares = (None if math.isnan(share) else share for share in self.per_class)
        return {**dataclasses.asdict(self), "per_class": dict(zip(self.classes, shares, strict=True))}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    world: World,
    *,
    micro_batch: int,
    classes: tuple[str, ...],
    device: torch.device,
    autocast: AbstractContextManager[object],
) -> Scores:
    """Return the scores over the set of `loader`, equal on all ranks. Raises RankLost."""
    modes = [(module, module.training) for module in model.modules()]  # a frozen layer may not be training
    model.eval()
    rank, size = world.place.rank, world.place.size
    layout = BatchLayout(micro_batch * size, micro_batch)  # the same micro-batches for every world size
    work = assignments(InSequence(loader.num_samples), 0, layout, rank, size)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    right = torch.zeros(len(classes), dtype=torch.float64, device=device)
    seen = torch.zeros_like(right)
    with unchanged(model):
        for micro in (micro for batch in loader.load(0, work) for micro in batch.micro_batches):
            with autocast:
                logits = model(micro.inputs)
            losses = F.cross_entropy(logits.float(), micro.targets, reduction="none").double()
            top1, top5 = (hit.double() for hit in metrics.hits(logits, micro.targets))
            sums += torch.stack([losses.sum(), top1.sum(), top5.sum()])
            right.index_add_(0, micro.targets, top1)
            seen.index_add_(0, micro.targets, torch.ones_like(top1))
    for module, training in modes:
        module.training = training
    total = world.sum(torch.cat([sums, right, seen]), "evaluation").cpu()
    right, seen = total[3:].chunk(2)
    count = int(seen.sum())
    loss, top1_share, top5_share = (total[:3] / count).tolist()
    return Scores(loss, top1_share, top5_share, count, classes, tuple((right / seen).tolist()))
