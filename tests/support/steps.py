"""Steps of a task, taken one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hvd_train.by_task import Mixer, Passes, unmixed
from hvd_train.config import Config
from hvd_train.data.batches import Batch
from hvd_train.handover import Handover
from hvd_train.progress.clock import Split
from hvd_train.state import TrainState
from hvd_train.step import StepResult, Steps, Votes, nothing_to_do
from hvd_train.tasks.meter import Meter
from hvd_train.world.world import World


class TaskSteps:
    """Takes steps of a task with one model."""

    def __init__(
        self,
        config: Config,
        world: World,
        model: nn.Module,
        device: torch.device,
        meter: Meter,
        mix: Mixer = unmixed,
        split: Split | None = None,
        handover: Handover | None = None,
    ) -> None:
        self.steps = Steps(config, world, model, device, meter.training, split, handover)
        self.passes = Passes(config, model, device, meter, mix)

    def take(
        self,
        state: TrainState,
        batch: Batch,
        votes: Votes,
        *,
        want_norm: bool,
        meanwhile: Callable[[], None] = nothing_to_do,
    ) -> StepResult:
        """Take one step."""
        return self.passes.take(self.steps, state, batch, votes, want_norm=want_norm, meanwhile=meanwhile)
