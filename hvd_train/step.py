"""One optimizer step: forward and backward over this rank's slots, then reduce, unscale, clip, step, in that order."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train.config import Config
from hvd_train.data.loader import Batch, MicroBatch
from hvd_train.errors import RankLost
from hvd_train.network.device import seed
from hvd_train.network.normalization import RunningStatistics
from hvd_train.progress import order
from hvd_train.progress.clock import Split
from hvd_train.progress.metrics import NUM_SUMS, Totals, sums_of
from hvd_train.state import TrainState
from hvd_train.world.world import World

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SLOT = 3  # tells the random numbers of a slot (dropout) from other uses of the seed


Mixer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Images [n, c, h, w] and class numbers [n] to images alike and targets that cross_entropy takes."""


def unmixed(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As they are."""
    return images, targets


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
    skipped: bool = False
    """Loss or gradient was not finite, so nothing has changed."""
    not_finite: tuple[int, ...] = ()
    """Of a skipped step: the samples of this rank whose loss is not finite."""


class Step:
    """Takes optimizer steps; holds settings and the model's running statistics, no progress."""

    def __init__(
        self,
        config: Config,
        world: World,
        model: nn.Module,
        device: torch.device,
        mix: Mixer = unmixed,
        together: Tensor | None = None,
        split: Split | None = None,
    ) -> None:
        """`mix` blends the images of a micro-batch and their targets.

        `together`: the model's layers meet over the ranks within each pass (an example of its input).
        `split` learns where the time goes.
        """
        self._mark = (split or Split()).mark
        self._world, self._device, self._seed = world, device, config.seed
        self._precision = config.precision.precision
        self._label_smoothing = config.optimizer.label_smoothing
        self._clip_norm = config.optimizer.clip_norm
        self._adasum = config.optimizer.reduction == "adasum"
        self._mix = mix
        self._empty = None if together is None else empty_like(together)
        self._statistics = RunningStatistics(model)

    def autocast(self) -> AbstractContextManager[object]:
        """The arithmetic of forward passes."""
        if self._precision == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=_DTYPES[self._precision])

    def take(
        self,
        state: TrainState,
        batch: Batch,
        votes: Votes,
        *,
        want_norm: bool,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Take one step. Raises RankLost before any weight has changed: the state is that of the step before.

        `meanwhile` is called while the gradients are on their way between the ranks.
        """
        try:
            return self._take(state, batch, votes, want_norm, meanwhile)
        except RankLost:
            self._statistics.undo()
            raise

    def _take(
        self, state: TrainState, batch: Batch, votes: Votes, want_norm: bool, meanwhile: Callable[[], None]
    ) -> StepResult:
        model, optimizer, scaler = state.model, state.optimizer, state.scaler
        micro_batches = self._as_many_as_others(batch)
        passes = len(micro_batches)
        # The ranks' gradients are added; Adasum wants each rank's own mean.
        divisor = batch.size
        if self._adasum:
            divisor = max(1, sum(len(micro.targets) for micro in micro_batches))
        # By hand: the optimizer's own, as Horovod wraps it, takes no arguments (issue #3405), and the model's looks
        # through all its modules.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            parameter.grad = None
        self._world.expect_passes(optimizer, passes)
        self._statistics.begin()
        share = _constant(1 / divisor, self._device)
        loss = sums = None
        seen: list[tuple[Tensor, Tensor]] = []
        for micro in micro_batches:
            if loss is not None:
                torch.autograd.backward(scaler.scale(loss), share)
                self._mark("backward")
            self._statistics.begin_slot()
            seed(self._device, order.key(self._seed, SLOT, state.progress.step, micro.number))
            inputs, targets = micro.inputs, micro.targets
            if len(targets):
                inputs, targets = self._mix(inputs, targets)
            with self.autocast():
                logits = model(inputs)
                loss = self._losses(logits, targets, "sum")
            answers = logits.detach()
            seen.append((answers, targets))
            of_slot = sums_of(loss.detach(), answers, micro.targets)
            sums = of_slot if sums is None else sums + of_slot
            if len(targets):
                self._statistics.end_slot()
            self._mark("forward")
        # All forward passes are done: what they gave travels with the gradients.
        if sums is None:
            sums = _constant((0.0,) * NUM_SUMS, self._device)
        wishes = _constant((float(votes.stop), float(votes.commit), float(votes.change)), self._device)
        given = torch.cat([sums, wishes, *self._statistics.changes])  # of its own: the sum over the ranks comes into it
        num_words = len(sums) + len(wishes)
        pending = self._world.sum_with_gradients(optimizer, given)
        if loss is not None:
            torch.autograd.backward(scaler.scale(loss), share)
            self._mark("backward")
        meanwhile()
        with self._world.reduced(optimizer):
            told = pending()
            # The last word of other ranks: now the step cannot break.
            totals, agreed = _read(told[:num_words], batch.size)
            self._mark("reduction")
            scaler.unscale_(optimizer)
            norm = self._clip(parameters)
            skipped = not (math.isfinite(totals.loss) and math.isfinite(norm))  # on all ranks: both are sums over them
            if skipped:
                self._statistics.undo()
            else:
                self._statistics.finish(told[num_words:], batch.num_slots)
                scaler.step(optimizer)
            scaler.update()
        self._mark("optimizer")
        not_finite = self._not_finite(batch, seen) if skipped else ()
        return StepResult(totals, agreed, norm if want_norm else None, skipped, not_finite)

    def _as_many_as_others(self, batch: Batch) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches and, where ranks meet within a pass, empty ones for those it has no part in."""
        if self._empty is None:
            return batch.micro_batches
        missing = -(-batch.num_slots // self._world.place.size) - len(batch.micro_batches)
        return (*batch.micro_batches, *[self._empty] * missing)

    def _losses(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=self._label_smoothing)

    def _not_finite(self, batch: Batch, seen: list[tuple[Tensor, Tensor]]) -> tuple[int, ...]:
        return tuple(
            int(sample)
            for micro, (logits, targets) in zip(batch.micro_batches, seen, strict=False)  # empty ones come last
            for sample, loss in zip(micro.samples, self._losses(logits.float(), targets, "none").tolist(), strict=True)
            if not math.isfinite(loss)
        )

    def _clip(self, parameters: list[nn.Parameter]) -> float:
        """The 2-norm of the whole gradient, which is scaled down to the largest one allowed."""
        # As torch's get_total_norm has it, less its search for gradients on other devices.
        norms = torch._foreach_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = math.hypot(*torch.stack(norms).tolist())
        if self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, torch.tensor(norm, device=self._device))
        return norm


def empty_like(images: Tensor) -> MicroBatch:
    """A micro-batch without samples, of such images."""
    return MicroBatch(-1, images[:0], torch.zeros(0, dtype=torch.long, device=images.device), np.zeros(0, np.int64))


@cache
def _constant(value: float | tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers that come again in each step, to be read only: to make a tensor of them takes longer than to use it."""
    return torch.tensor(value, device=device)


def _read(result: Tensor, count: int) -> tuple[Totals, Votes]:
    *sums, stop, commit, change = result.tolist()
    return Totals.of(sums, count), Votes(stop > 0, commit > 0, change > 0)
