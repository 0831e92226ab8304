"""What training reports about itself, as plain values: a step, an epoch, and the moment that a display shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """A training step as metrics.jsonl has it.

    Loss and accuracies are means over the global batch, accuracies lie between 0 and 1, and the speed is
    that of all ranks.
    """

    epoch: int
    """The epoch that the step belongs to, counted from 1."""
    step: int
    """The number of the step in the whole run, counted from 1."""
    samples: int
    """The samples that the run has taken up to and including this step."""
    loss: float
    top1: float
    top5: float
    learning_rate: float
    gradient_norm: float | None
    loss_scale: float | None
    """The factor on the loss of a float16 run; None if gradients are not scaled."""
    skipped_steps: int
    """The steps since the run began whose loss or gradient was not finite."""
    images_per_second: float
    split: dict[str, float] | None
    """Mean seconds that rank 0 spent in each phase of a step (clock.PHASES) since the last record."""


@dataclass(frozen=True)
class EpochRecord:
    """An epoch as metrics.jsonl has it, counted from 1; the val_ fields are None if it was not evaluated."""

    epoch: int
    step: int
    """The number of its last step."""
    loss: float
    top1: float
    top5: float
    val_loss: float | None
    val_top1: float | None
    val_top5: float | None
    images_per_second: float


@dataclass(frozen=True)
class Moment:
    """How far training is right now, for the display only: loss and accuracy are means of the current epoch so far."""

    epoch: int
    """Epochs that are finished."""
    cursor: int
    """Samples of the current epoch that have been taken."""
    step: int
    """Steps that the run has done."""
    loss: float
    top1: float
    images_per_second: float
