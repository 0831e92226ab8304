"""What a training by a task does in its steps: forward pass, losses and measures of each slot.

`train` is the loop of `hvd_train.train`, and reads as a loop of one's own does (`own_loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hvd_train.config import Config
from hvd_train.data.batches import Batch
from hvd_train.data.trees import Tree
from hvd_train.network.device import autocast
from hvd_train.state import TrainState
from hvd_train.step import Slot, Step, StepResult, Steps, Votes, nothing_to_do
from hvd_train.tasks.meter import Meter
from hvd_train.tasks.task import Outputs
from hvd_train.validate import Scores

Mixer = Callable[[Tree, Tree], tuple[Tree, Tree]]
"""Turns images [n, c, h, w] and class numbers [n] into such images and targets that `cross_entropy` takes."""


def unmixed(inputs: Tree, targets: Tree) -> tuple[Tree, Tree]:
    """Return inputs and targets as they are: the mixer of a training without mixup and cutmix."""
    return inputs, targets


def train(steps: Iterable[Step], passes: Passes, evaluate: Callable[[], Scores | None]) -> None:
    """Take all steps, and evaluate at the end of each epoch in which it is time to."""
    for step in steps:
        with step:
            for slot in step:
                passes.through(slot)
            step.finish()
            if step.ends_epoch:
                step.scores = evaluate()


class Passes:
    """Passes slots through a model, as a task has it."""

    def __init__(
        self, config: Config, model: nn.Module, device: torch.device, meter: Meter, mix: Mixer = unmixed
    ) -> None:
        """`meter` measures the task, and `mix` blends the images of a slot."""
        self._model, self._meter, self._task, self._mix = model, meter, meter.task, mix
        self._autocast = autocast(config.precision.precision, device)

    def through(self, slot: Slot) -> None:
        """Pass a slot through the model, and its losses backwards."""
        outputs, losses = self.forward(slot.inputs, slot.targets, len(slot))
        with self._autocast, torch.no_grad():
            measures = self._task.measures(outputs, slot.targets)
        slot.backward(losses, **measures)

    def forward(self, inputs: Tree, targets: Tree, count: int) -> tuple[Outputs, Tensor]:
        """Return what the model makes of a slot of `count` samples, and the losses, [count]."""
        inputs, targets = self._mix(inputs, targets)
        with self._autocast:
            outputs = self._task.forward(self._model, inputs)
            return outputs, self._meter.losses(outputs, targets, count)

    def take(
        self,
        steps: Steps,
        state: TrainState,
        batch: Batch,
        votes: Votes,
        *,
        want_norm: bool = False,
        meanwhile: Callable[[], None] = nothing_to_do,
    ) -> StepResult:
        """Take one step by itself, and return its result. Raises what has ended it early."""
        with steps.begin(state, batch, votes, want_norm=want_norm, meanwhile=meanwhile) as step:
            for slot in step:
                self.through(slot)
            step.finish()
        return step.result
