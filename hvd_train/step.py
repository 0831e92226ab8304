"""One optimizer step: forward and backward over this rank's slots, then reduce, unscale, clip, step, in that order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train import metrics, order
from hvd_train.config import Config
from hvd_train.data.loader import Batch
from hvd_train.errors import RankLost
from hvd_train.metrics import Totals
from hvd_train.normalization import RunningStatistics
from hvd_train.state import TrainState
from hvd_train.world import World

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_SLOT = 3  # tells the random numbers of a slot (dropout) from other uses of the seed


@dataclass(frozen=True)
class Votes:
    """What one rank wishes for after this step; it happens when any rank wishes it, on all of them."""

    stop: bool = False
    commit: bool = False
    change: bool = False
    """Go on in another world."""


@dataclass(frozen=True)
class StepResult:
    """The sums over the whole global batch, what the ranks agreed on, and the gradient's 2-norm if it was asked for."""

    totals: Totals
    agreed: Votes
    gradient_norm: float | None


class Step:
    """Takes optimizer steps; holds settings and the model's running statistics, no progress."""

    def __init__(self, config: Config, world: World, model: nn.Module, device: torch.device) -> None:
        self._world, self._device, self._seed = world, device, config.seed
        self._precision = config.precision.precision
        self._label_smoothing = config.optimizer.label_smoothing
        self._clip_norm = config.optimizer.clip_norm
        self._statistics = RunningStatistics(model)

    def autocast(self) -> torch.autocast:
        """The arithmetic of a forward pass."""
        mixed = self._precision != "fp32"
        dtype = _DTYPES[self._precision] if mixed else None
        return torch.autocast(self._device.type, dtype=dtype, enabled=mixed)

    def take(self, state: TrainState, batch: Batch, votes: Votes, *, want_norm: bool) -> StepResult:
        """Take one step. Raises RankLost before any weight has changed: the state is that of the step before."""
        try:
            return self._take(state, batch, votes, want_norm=want_norm)
        except RankLost:
            self._statistics.undo()
            raise

    def _take(self, state: TrainState, batch: Batch, votes: Votes, *, want_norm: bool) -> StepResult:
        model, optimizer, scaler = state.model, state.optimizer, state.scaler
        passes = len(batch.micro_batches)
        model.zero_grad(set_to_none=True)  # not the optimizer's: Horovod's takes no arguments (issue #3405)
        self._world.expect_passes(optimizer, passes)
        self._statistics.begin()
        sums = torch.zeros(3, device=self._device)
        loss = None
        for micro in batch.micro_batches:
            if loss is not None:
                torch.autograd.backward(scaler.scale(loss))
            self._statistics.begin_slot()
            torch.manual_seed(order.key(self._seed, _SLOT, state.progress.step, micro.number))
            with self.autocast():
                logits = model(micro.inputs)
                losses = F.cross_entropy(logits, micro.targets, reduction="none", label_smoothing=self._label_smoothing)
            loss = losses.sum() / batch.size
            sums += metrics.sums(losses, logits, micro.targets)
            self._statistics.end_slot()
        # All forward passes are done: what they gave travels while the last backward pass runs.
        wishes = torch.tensor([float(v) for v in (votes.stop, votes.commit, votes.change)], device=self._device)
        pending = self._world.start_sum(torch.cat([sums, wishes]), "step")
        self._statistics.start_sum(self._world)
        if loss is not None:
            torch.autograd.backward(scaler.scale(loss))
        with self._world.reduced(optimizer):
            totals, agreed = _read(pending(), batch.size)
            self._statistics.finish(batch.num_slots)
            scaler.unscale_(optimizer)
            norm = self._clip(model) if want_norm or self._clip_norm else None
            scaler.step(optimizer)
            scaler.update()
        return StepResult(totals, agreed, norm.item() if norm is not None and want_norm else None)

    def _clip(self, model: nn.Module) -> Tensor:
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        return nn.utils.clip_grad_norm_(parameters, self._clip_norm or float("inf"))


def _read(result: Tensor, count: int) -> tuple[Totals, Votes]:
    loss, top1, top5, stop, commit, change = result.tolist()
    return Totals(loss, top1, top5, count), Votes(stop > 0, commit > 0, change > 0)
