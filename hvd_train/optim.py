"""The optimizer a config names, over the parameters that are trained."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hvd_train.config import OptimizerConfig
from hvd_train.errors import UsageError


def build(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """The optimizer; its learning rate is set before each step by the loop. Raises UsageError with nothing to train."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("the model has no parameter to train")
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.learning_rate,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )
    cls: type[torch.optim.Adam] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return cls(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)


def average(config: OptimizerConfig, model: nn.Module) -> AveragedModel | None:
    """The moving average of weights and running statistics, where one is kept; after the first step it is the model.

    As in torchvision's training references: averages of buffers too, so that statistics belong to the weights.
    """
    if config.ema_decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay), use_buffers=True)  # type: ignore[no-untyped-call]


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """The learning rate of the next step, for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
