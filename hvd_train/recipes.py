"""Named, complete configurations, each a function. Its docstring says the command, the machine and what to expect."""

from __future__ import annotations

from collections.abc import Callable

from hvd_train.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from hvd_train.errors import unknown_name


def digits() -> Config:
    """Scanned handwritten digits (1,797 images of 8 x 8 pixels, no download), a small convnet.

    `horovodrun -np 2 hvd-train train digits`: under a minute on two CPU cores, at least 98% top-1.
    """
    return Config(
        recipe="digits",
        data=DataConfig(data="digits"),
        model=ModelConfig(model="digits-convnet"),
        batch=BatchConfig(global_batch_size=64),
        optimizer=OptimizerConfig(optimizer="sgd", learning_rate=0.1, nesterov=True, weight_decay=5e-4),
        schedule=ScheduleConfig(epochs=20, schedule="cosine", warmup_epochs=1),
    )


RECIPES: dict[str, Callable[[], Config]] = {"digits": digits}
DEFAULT = "digits"


def get(name: str) -> Config:
    """The config of a recipe by name. Raises UsageError with the nearest name where there is none."""
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]()
