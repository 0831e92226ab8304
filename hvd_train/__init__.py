"""Exact, elastic data-parallel training of PyTorch models with Horovod."""

import importlib
from typing import TYPE_CHECKING, Any

from hvd_train._version import __version__

if TYPE_CHECKING:
    from hvd_train import recipes as recipes
    from hvd_train.config import Config as Config
    from hvd_train.data.dataset import DataSet as DataSet
    from hvd_train.data.shards import Shards as Shards
    from hvd_train.data.tokens import Tokens as Tokens
    from hvd_train.errors import HvdTrainError as HvdTrainError
    from hvd_train.errors import UsageError as UsageError
    from hvd_train.progress.order import in_order as in_order
    from hvd_train.result import Result as Result
    from hvd_train.run import evaluate as evaluate
    from hvd_train.run import train as train
    from hvd_train.session import Session as Session
    from hvd_train.session import parse_args as parse_args
    from hvd_train.tasks.task import Each as Each
    from hvd_train.tasks.task import Mean as Mean
    from hvd_train.tasks.task import Scores as Scores
    from hvd_train.tasks.task import Task as Task
    from hvd_train.tasks.task import Total as Total

_HOME = {
    "Config": "config",
    "DataSet": "data.dataset",
    "Each": "tasks.task",
    "HvdTrainError": "errors",
    "Mean": "tasks.task",
    "Result": "result",
    "Scores": "tasks.task",
    "Session": "session",
    "Shards": "data.shards",
    "Task": "tasks.task",
    "Tokens": "data.tokens",
    "Total": "tasks.task",
    "UsageError": "errors",
    "evaluate": "run",
    "in_order": "progress.order",
    "parse_args": "session",
    "recipes": "recipes",
    "train": "run",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, since that may import torch.

    Raises AttributeError for any other name.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.launch.exit_report").report_in_one_line()
    importlib.import_module(f"{__name__}.launch.stacks").register_rank()
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    return getattr(module, name, module)  # `recipes` is a module itself


def __dir__() -> list[str]:
    return sorted(__all__)
