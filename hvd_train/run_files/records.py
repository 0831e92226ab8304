"""Plain values that training reports: a step, an epoch, and the moment that a display shows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """A training step as metrics.jsonl has it; loss and accuracies (0 to 1) are means over the global batch."""

    epoch: int  # counted from 1
    step: int  # in the whole run, counted from 1
    samples: int  # that the run has taken, including this step
    loss: float
    top1: float
    top5: float
    learning_rate: float
    gradient_norm: float | None
    loss_scale: float | None  # None if gradients are not scaled
    skipped_steps: int  # in the whole run, because a loss or gradient was not finite
    images_per_second: float  # of all ranks
    split: dict[str, float] | None  # rank 0's mean seconds in each of clock.PHASES since the last record


@dataclass(frozen=True)
class EpochRecord:
    """An epoch as metrics.jsonl has it; the val_ fields are None if it was not evaluated."""

    epoch: int  # counted from 1
    step: int  # its last one
    loss: float
    top1: float
    top5: float
    val_loss: float | None
    val_top1: float | None
    val_top5: float | None
    images_per_second: float


@dataclass(frozen=True)
class Moment:
    """The progress of training for the display; loss and accuracy are means of the current epoch so far."""

    epoch: int  # finished epochs
    cursor: int  # samples taken in the current epoch
    step: int  # steps of the whole run
    loss: float
    top1: float
    images_per_second: float
