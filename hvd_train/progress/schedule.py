"""Compute the learning rate of a step, by a schedule of the config or a function of the user.

No torch.
"""

import math

from hvd_train import plugin
from hvd_train.config import OptimizerConfig, ScheduleConfig
from hvd_train.errors import UsageError


def peak_learning_rate(optimizer: OptimizerConfig, global_batch_size: int) -> float:
    """Return the learning rate after the warm-up, scaled by `lr_scaling`.

    linear: Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677); sqrt: Krizhevsky, "One
    weird trick for parallelizing convolutional neural networks" (arXiv 1404.5997).
    """
    ratio = global_batch_size / optimizer.lr_base_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optimizer.lr_scaling]
    return optimizer.learning_rate * factor


def learning_rate_factor(schedule: ScheduleConfig, epochs_done: float) -> float:
    """Return the share of the peak learning rate after `epochs_done` epochs.

    Pass the middle of a step's batch: at its edges a warm-up starts, and a cosine ends, with a
    learning rate of zero. One cycle is torch's OneCycleLR (Smith and Topin, arXiv 1708.07120): a
    cosine up from 1/25, one down to 4e-6. Raises UsageError if the user's own function returns no
    number from 0 on.
    """
    kind = schedule.schedule
    warmup = schedule.warmup_epochs
    if kind == "one-cycle":
        warmup = warmup or 0.3 * schedule.epochs
        if epochs_done < warmup:
            return _half_cosine(0.04, 1 - epochs_done / warmup)
    if epochs_done < warmup:
        return epochs_done / warmup
    if kind == "step":
        return schedule.decay_factor ** sum(epochs_done >= epoch for epoch in schedule.decay_epochs)
    if kind == "constant":
        return 1.0
    if plugin.is_reference(kind):
        factor = plugin.load("schedule", kind)(epochs_done)
        if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
            raise UsageError(
                f"--schedule {kind}: {factor!r} after {epochs_done:g} epochs is "
                "not a number from 0 on"
            )
        return float(factor)
    length = schedule.epochs - warmup
    share = min(1.0, (epochs_done - warmup) / length) if length else 1.0
    if kind == "linear":
        return 1 - share * (1 - schedule.final_factor)
    return _half_cosine(4e-6 if kind == "one-cycle" else schedule.final_factor, share)


def _half_cosine(end: float, share: float) -> float:
    return end + (1.0 - end) * 0.5 * (1 + math.cos(math.pi * share))
