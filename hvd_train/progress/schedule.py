"""Compute the learning rate as a pure function of progress."""

import math

from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.settings.schedule import ScheduleConfig


def peak_learning_rate(optimizer: OptimizerConfig, global_batch_size: int) -> float:
    """Return the learning rate after the warm-up, scaled by `lr_scaling`.

    linear: Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677); sqrt: Krizhevsky, "One weird trick for
    parallelizing convolutional neural networks" (arXiv 1404.5997).
    """
    ratio = global_batch_size / optimizer.lr_base_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optimizer.lr_scaling]
    return optimizer.learning_rate * factor


def learning_rate_factor(schedule: ScheduleConfig, epochs_done: float) -> float:
    """Return the share (0 to 1) of the peak learning rate after `epochs_done` epochs.

    Pass the middle of a step's batch: at its edges a warm-up starts, and a cosine ends, with a learning rate of zero.
    """
    if epochs_done < schedule.warmup_epochs:
        return epochs_done / schedule.warmup_epochs
    if schedule.schedule == "cosine":
        length = schedule.epochs - schedule.warmup_epochs
        share = min(1.0, (epochs_done - schedule.warmup_epochs) / length) if length else 1.0
        return 0.5 * (1 + math.cos(math.pi * share))
    if schedule.schedule == "step":
        return schedule.decay_factor ** sum(epochs_done >= epoch for epoch in schedule.decay_epochs)
    return 1.0
