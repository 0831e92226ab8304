"""Meters of tasks for tests."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from hvd_train.network.trial_passes import Trial
from hvd_train.tasks.classification import classification
from hvd_train.tasks.meter import Meter


def meter_of_classes(classes: tuple[str, ...] = tuple("0123456789")) -> Meter:
    """Return what measures the classification of these classes."""
    logits, targets = torch.zeros(2, len(classes)), torch.zeros(2, dtype=torch.long)
    return Meter.of(classification(classes), logits, targets, 2)


def trial_of(model: nn.Module, inputs: Tensor) -> Trial:
    """Return what trial passes are made of, for a model that tells classes apart."""
    task = meter_of_classes().task
    targets = torch.zeros(len(inputs), dtype=torch.long)
    return Trial(model, task.forward, task.loss, inputs, targets, nullcontext())


NUM_SUMS = meter_of_classes().training.size
"""The numbers of a step's sums, after which the votes stand in what travels with the gradients."""
