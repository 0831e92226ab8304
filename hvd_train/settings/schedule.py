"""How long a run trains, when it stops early, and how the learning rate moves."""

from dataclasses import dataclass
from typing import Literal

from hvd_train.errors import UsageError
from hvd_train.settings.fields import at_least, free, positive, share


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How long a run trains, and how the learning rate moves."""

    epochs: int = 10
    """Passes over the training set."""
    target_accuracy: float | None = free(None)
    """Stop after the evaluation whose top-1 reaches this share, 0 to 1."""
    patience: int | None = free(None)
    """Stop when this many epochs in a row have brought no better evaluation."""
    best_by: Literal["top1", "loss"] = "top1"
    """What makes an evaluation the best one: the highest top-1, or the lowest loss."""
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    """Learning rate after the warm-up: constant, a half cosine down to 0, or steps down."""
    warmup_epochs: float = 0.0
    """Epochs (fractions allowed) over which the learning rate rises linearly from 0."""
    decay_epochs: tuple[float, ...] = (30, 60, 80)
    """Epochs at which --schedule step multiplies the learning rate by `decay-factor`."""
    decay_factor: float = 0.1
    """What --schedule step multiplies the learning rate by at each of `decay-epochs`."""

    def __post_init__(self) -> None:
        at_least("epochs", self.epochs, 1)
        at_least("warmup-epochs", self.warmup_epochs, 0)
        at_least("patience", self.patience, 1)
        positive("target-accuracy", self.target_accuracy)
        share("target-accuracy", self.target_accuracy or 0.0)
        positive("decay-factor", self.decay_factor)
        if list(self.decay_epochs) != sorted(self.decay_epochs):
            raise UsageError("--decay-epochs must rise, as in --decay-epochs 30 60 80")
        if self.warmup_epochs > self.epochs:
            raise UsageError(
                f"--warmup-epochs {self.warmup_epochs:g} is longer than the whole run (--epochs {self.epochs})"
            )
