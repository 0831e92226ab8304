"""Regression: each sample has one number or several. Squared, absolute or Huber's loss, and mean errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from hvd_train.errors import UsageError
from hvd_train.progress.figures import Figure, Sums, mean
from hvd_train.tasks.task import Task


def regression(outputs: int, loss: str = "squared") -> Task:
    """Return the task of predicting so many numbers; targets are float [n] or [n, outputs].

    `loss` is "squared", "absolute" or "huber" (Huber, 1964: squared up to an error of 1, then absolute). Figures: the
    mean absolute error, the root of the mean squared error, and in evaluations R2, the share of the targets' variance
    that the model explains. Raises UsageError for another loss.
    """
    losses: dict[str, Callable[..., Tensor]] = {"squared": F.mse_loss, "absolute": F.l1_loss, "huber": F.huber_loss}
    if loss not in losses:
        raise UsageError(f"--task-args loss={loss}: it must be one of {', '.join(losses)}")

    def of_sample(predicted: Tensor, targets: Tensor) -> Tensor:
        return _mean(losses[loss](predicted.float().reshape_as(targets), targets.float(), reduction="none"))

    def measures(predicted: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        errors = predicted.float().reshape_as(targets) - targets
        return {"mae": _mean(errors.abs()), "squared": _mean(errors.square())}

    def of_targets(predicted: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        numbers = targets.double().reshape(len(targets), -1)
        errors = predicted.double().reshape_as(numbers) - numbers
        return {"targets": numbers, "squared_targets": numbers.square(), "squared_errors": errors.square()}

    return Task(
        loss=of_sample,
        measures=measures,
        evaluated_measures=of_targets,
        figures=(
            mean("mae", "mean absolute error", "lower"),
            Figure("rmse", "RMSE", "lower", value=lambda sums, count: float(sums["squared"] / count) ** 0.5),
            Figure("r2", "R2", "higher", value=_explained, in_training=False),
        ),
        best="rmse",
        refusal=lambda predicted, targets: (
            None
            if isinstance(predicted, Tensor)
            and predicted.numel() == targets.numel()
            and predicted.shape[:1] == targets.shape[:1]
            else f"it must return numbers of the shape of the targets, {tuple(targets.shape)}"
        ),
        outputs=outputs,
    )


def _mean(values: Tensor) -> Tensor:
    """Return the mean over whatever comes after the first dimension, [n]."""
    return values if values.ndim == 1 else values.flatten(1).mean(1)


def _explained(sums: Sums, count: int) -> float:
    """Return R2: 1 less the squared errors over the squared distances of the targets from their mean.

    It is NaN where targets are all the same: what is left of their spread is rounding.
    """
    spread = sums["squared_targets"] - sums["targets"] ** 2 / count
    spread = np.where(spread > 1e-12 * sums["squared_targets"], spread, np.nan)
    return float((1 - sums["squared_errors"] / spread).mean())
