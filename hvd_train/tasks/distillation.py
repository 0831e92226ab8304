"""Distillation: a small model learns what a large one says (Hinton, Vinyals and Dean, 2015)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train.errors import UsageError
from hvd_train.tasks.classification import classification
from hvd_train.tasks.task import Task, call


class Both(NamedTuple):
    """The logits of the model that is trained and those of its teacher, [n, classes] each."""

    student: Tensor
    teacher: Tensor


def distillation(
    classes: tuple[str, ...],
    teacher: nn.Module,
    temperature: float = 4.0,
    weight: float = 0.9,
    label_smoothing: float = 0.0,
) -> Task:
    """Return the task of telling classes apart, and of saying what `teacher` says about each sample.

    The loss is `weight` times temperature^2 times the divergence (Kullback-Leibler) of the two models' probabilities,
    of logits over the temperature, and the rest of 1 times the cross entropy. It is measured as classification is. The
    teacher is neither trained nor committed. Raises UsageError for a temperature or a weight that cannot be.
    """
    if not (temperature > 0 and 0 <= weight <= 1):
        raise UsageError("--task-args: the temperature must be above 0, and the weight from 0 to 1")
    plain = classification(classes, label_smoothing)

    def forward(model: nn.Module, images: Tensor) -> Both:
        student = call(model, images)
        with torch.no_grad():
            return Both(student, call(teacher, images))

    def loss(both: Both, targets: Tensor) -> Tensor:
        mine, theirs = (F.log_softmax(logits.float() / temperature, dim=1) for logits in both)
        divergence = F.kl_div(mine, theirs, reduction="none", log_target=True).sum(1)
        return weight * temperature**2 * divergence + (1 - weight) * plain.loss(both.student, targets)

    assert plain.evaluated_loss is not None
    of_student = plain.evaluated_loss
    return replace(
        plain,
        loss=loss,
        evaluated_loss=lambda both, targets: of_student(both.student, targets),
        measures=lambda both, targets: plain.measures(both.student, targets),
        evaluated_measures=lambda both, targets: plain.evaluated_measures(both.student, targets),
        refusal=lambda both, targets: plain.refusal(both.student, targets),
        forward=forward,
        modules=(teacher,),
    )
