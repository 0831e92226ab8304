"""The learning rate as a pure function of progress, so that no change of world or resume can disturb it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from functools import cache
from typing import Any

from hvd_train import plugin
from hvd_train.errors import UsageError
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.settings.schedule import ScheduleConfig


def peak_learning_rate(optimizer: OptimizerConfig, global_batch_size: int) -> float:
    """Return the learning rate after the warm-up, scaled to the global batch (in samples) as `lr_scaling` says.

    linear: Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677); sqrt: Krizhevsky, "One weird
    trick" (arXiv 1404.5997), which keeps the variance of the gradient estimate.
    """
    ratio = global_batch_size / optimizer.lr_base_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optimizer.lr_scaling]
    return optimizer.learning_rate * factor


def learning_rate_factor(schedule: ScheduleConfig, epochs_done: float, floor: float = 0.0) -> float:
    """Return the share of the peak learning rate after `epochs_done` epochs; a fraction is part of an epoch.

    It is 0 to 1, and from the warm-up on at least `floor`, but for steps and the user's own function. Take the middle
    of a step's batch for `epochs_done`: then neither the first step of a warm-up nor the last one of a cosine is taken
    with a learning rate of zero. Raises UsageError where the user's function cannot be called or returns no factor.
    """
    kind, rise = schedule.schedule, schedule.warmup_epochs
    if kind == "one-cycle":
        rise = rise or _RISE * schedule.epochs
        if epochs_done < rise:
            return _BEGIN + (1 - _BEGIN) * (1 - _half_cosine(epochs_done / rise))
    warmed = epochs_done / rise if epochs_done < rise else 1.0
    if plugin.is_reference(kind):
        return warmed * _own_factor(schedule, epochs_done)
    if epochs_done < rise:
        return warmed
    if kind == "step":
        return schedule.decay_factor ** sum(epochs_done >= epoch for epoch in schedule.decay_epochs)
    if kind == "constant":
        return 1.0
    length = schedule.epochs - rise
    share = min(1.0, (epochs_done - rise) / length) if length else 1.0
    return floor + (1 - floor) * (1 - share if kind == "linear" else _half_cosine(share))


def check(schedule: ScheduleConfig) -> None:
    """Raise UsageError where the user's function cannot be a schedule: it is called over all epochs, forth and back."""
    if plugin.is_reference(schedule.schedule):
        times = [schedule.epochs * number / 100 for number in range(101)]
        forth = [_own_factor(schedule, time) for time in times]
        back = [_own_factor(schedule, time) for time in reversed(times)]
        if forth != back[::-1]:
            raise UsageError(
                f"--schedule {schedule.schedule}: called twice with the same progress it returns different factors"
            )


def same_until_end(schedule: ScheduleConfig, longer: ScheduleConfig) -> bool:
    """Return whether `longer`, the same schedule with more epochs, has the same learning rate over those of `schedule`.

    Then a finished run can go on longer, as if it had been meant to from its start. The user's own function is compared
    at fifty moments of each epoch, as far as they are no more than a hundred thousand. Raises UsageError as
    `learning_rate_factor` does.
    """
    count = min(50 * schedule.epochs, 100_000)
    moments = [schedule.epochs * (number + 0.5) / count for number in range(count)]
    return all(learning_rate_factor(schedule, time) == learning_rate_factor(longer, time) for time in moments)


_RISE, _BEGIN = 0.3, 1 / 25
"""What share of the run the rise of one-cycle takes, and from which share of the peak on, as in torch's OneCycleLR."""


def _half_cosine(share: float) -> float:
    """Return how far half a cosine has fallen from 1 to 0 at this share of its length."""
    return 0.5 * (1 + math.cos(math.pi * share))


def _own_factor(schedule: ScheduleConfig, epochs_done: float) -> float:
    """Return what the user's function returns. Raises UsageError where that is no number from 0 on."""
    name, function = schedule.schedule, _own(schedule.schedule)
    moment = f"at epoch {epochs_done:g} of {schedule.epochs}"
    try:
        returned = function(epochs_done, schedule.epochs)
    except Exception as error:  # whatever the user's code raises
        raise UsageError(f"--schedule {name}: {moment}: {plugin.first_line(error)}") from error
    try:
        factor = float(returned)
    except (TypeError, ValueError):
        what = " ".join(reprlib.repr(returned).split())
        raise UsageError(f"--schedule {name}: {moment} it returned {what}; it must be a number") from None
    if not (factor >= 0 and math.isfinite(factor)):
        raise UsageError(f"--schedule {name}: {moment} it returned {factor:g}; it must be a number from 0 on")
    return factor


@cache
def _own(reference: str) -> Callable[..., Any]:
    function: Callable[..., Any] = plugin.load("schedule", reference)
    return function
