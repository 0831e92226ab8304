"""The destinations of `--log-to`: what each needs, and how it is opened. None is imported unless it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_train.errors import UsageError
from hvd_train.run_files.destination import Destination
from hvd_train.run_files.durable import Permission
from hvd_train.run_files.run_folder import METRICS, TABLE

_MODULES = {"tensorboard": "board", "wandb": "wandb_run", "mlflow": "mlflow_run", "csv": "csv_file"}


@dataclass(frozen=True)
class Facts:
    """What the destinations of a run are told about it."""

    folder: Path
    resumed_step: int
    """The step after which the run goes on; whatever came after it did not happen."""
    epochs_done: int
    settings: Mapping[str, Any]
    """The config as plain values, in groups."""
    report: Callable[[str], None]
    """Takes a line for the user; it is called from the thread that trains."""
    permission: Permission
    """Says whether this process may write (still)."""


def check(names: Iterable[str]) -> None:
    """Raise UsageError where a library is missing, or nobody is logged in at a service. No service is asked."""
    for name in names:
        if name in ("wandb", "mlflow"):
            try:
                importlib.import_module(name)
            except ImportError as error:
                todo = f"type pip install 'hvd_train[{name}]', or leave {name} out"
                raise UsageError(f"--log-to {name}: {name} cannot be imported ({error}): {todo}") from None
    if "wandb" in names:
        from hvd_train.run_files import wandb_run

        wandb_run.check_login()


def load(names: Iterable[str]) -> None:
    """Import what is slow to import, so that a rank can open the destinations from one step to the next."""
    for name in names:
        importlib.import_module(f"{__package__}.{_MODULES[name]}")
        if name in ("wandb", "mlflow"):
            importlib.import_module(name)


def opened(name: str, facts: Facts) -> Destination:
    """Open a destination. Raises OSError where its file cannot be read, and UsageError where it is none of a run."""
    folder, report, permission = facts.folder, facts.report, facts.permission
    if name == "tensorboard":
        from hvd_train.run_files.board import Board

        return Board(folder / "tensorboard", facts.resumed_step, report, permission)
    if name == "csv":
        from hvd_train.run_files.csv_file import CsvFile

        return CsvFile(folder / TABLE, facts.resumed_step, facts.epochs_done, report, permission)
    from hvd_train.run_files.in_background import InBackground

    if name == "wandb":
        from hvd_train.run_files.wandb_run import WandbRun

        return InBackground("wandb", WandbRun(folder, facts.settings, permission), folder / METRICS, report, permission)
    from hvd_train.run_files.mlflow_run import MlflowRun

    return InBackground("mlflow", MlflowRun(folder, facts.settings, permission), folder / METRICS, report, permission)
