"""How long a run trains, when it stops early, and how the learning rate moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_train.errors import UsageError
from hvd_train.settings.fields import at_least, free, positive, seconds_in, share, to_known_name

_TO_THE_LEAST = ("cosine", "linear", "one-cycle")
TRIAL_STEPS = 3
SCHEDULES = ("constant", "step", *_TO_THE_LEAST)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How long a run trains, and how the learning rate moves."""

    epochs: int = 10
    """Passes over the training set."""
    target_accuracy: float | None = free(None)
    """Stop after the evaluation whose top-1 reaches this share, 0 to 1."""
    target: str | None = free(None)
    """Stop after the evaluation in which a figure of the task reaches a value, as in miou=0.7 or loss=0.1."""
    patience: int | None = free(None)
    """Stop when this many epochs in a row have brought no better evaluation."""
    max_steps: int | None = free(None)
    """End the run after so many optimizer steps over all its starts, in the middle of an epoch if need be."""
    trial: bool = False
    """Try everything out, in a run of its own: three steps (or `max-steps`), evaluations of a few batches, and all
    files of an end. Nothing else of the settings changes."""
    total_time: str | None = free(None)
    """End the run when so much time was spent on training over all its starts, as in 2h30m, 1.5h or 90m, in the middle
    of an epoch if need be; a number alone is seconds."""
    best_by: str = "auto"
    """The figure of the task that makes an evaluation the best one, as in top1 or loss; auto: the task says which."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: constant; cosine, half of one down to `min-learning-rate`; linear, a straight
    line down to it; step, steps down; one-cycle, half a cosine up from a 25th and half a cosine down; or your own
    package.module:function, which is given the epochs that are done and their number, and returns what to multiply
    the peak by."""
    warmup_epochs: float = 0.0
    """Epochs (fractions allowed) over which the learning rate rises linearly from 0; with one-cycle the epochs of its
    rise (default: 0.3 of all)."""
    min_learning_rate: float = 0.0
    """Learning rate at the end of a cosine, linear or one-cycle schedule; it is scaled as `learning-rate` is."""
    decay_epochs: tuple[float, ...] = (30, 60, 80)
    """Epochs at which --schedule step multiplies the learning rate by `decay-factor`."""
    decay_factor: float = 0.1
    """What --schedule step multiplies the learning rate by at each of `decay-epochs`."""

    def __post_init__(self) -> None:
        to_known_name(self, "schedule", SCHEDULES)
        at_least("min-learning-rate", self.min_learning_rate, 0)
        if self.min_learning_rate and self.schedule not in _TO_THE_LEAST:
            raise UsageError(f"--min-learning-rate needs --schedule {', '.join(_TO_THE_LEAST[:-1])} or one-cycle")
        at_least("epochs", self.epochs, 1)
        at_least("warmup-epochs", self.warmup_epochs, 0)
        at_least("patience", self.patience, 1)
        at_least("max-steps", self.max_steps, 1)
        _ = self.aim, self.total_seconds  # raise for what is no figure and value, or not a time
        positive("target-accuracy", self.target_accuracy)
        share("target-accuracy", self.target_accuracy or 0.0)
        positive("decay-factor", self.decay_factor)
        if list(self.decay_epochs) != sorted(self.decay_epochs):
            raise UsageError("--decay-epochs must rise, as in --decay-epochs 30 60 80")
        if self.warmup_epochs > self.epochs:
            raise UsageError(
                f"--warmup-epochs {self.warmup_epochs:g} is longer than the whole run (--epochs {self.epochs}); type "
                f"--warmup-epochs {self.epochs} or less, or more --epochs"
            )

    @property
    def last_step(self) -> int | None:
        """The number of the step after which the run ends in any case, counted from 1; None where its epochs end it."""
        return TRIAL_STEPS if self.trial and self.max_steps is None else self.max_steps

    @property
    def total_seconds(self) -> float | None:
        """`total_time` in seconds; None where there is no limit. Raises UsageError for what is not a time."""
        return seconds_in("total-time", self.total_time)

    @property
    def aim(self) -> tuple[str, float] | None:
        """The figure to reach and its value; None without one. Raises UsageError for what is not a figure and value."""
        if self.target is None:
            return None if self.target_accuracy is None else ("top1", self.target_accuracy)
        if self.target_accuracy is not None:
            raise UsageError("--target and --target-accuracy are two aims: leave one out")
        name, _, value = self.target.partition("=")
        try:
            aim = float(value)
        except ValueError:
            aim = math.nan
        if not name or not math.isfinite(aim):
            raise UsageError(f"--target {self.target}: write a figure and its value, as in --target miou=0.7")
        return name, aim
