"""Tasks by name: the built-in ones, or the user's own."""

from collections.abc import Callable

from hvd_train import plugin
from hvd_train.config import Config
from hvd_train.errors import UsageError, unknown_name
from hvd_train.tasks import builtin
from hvd_train.tasks.classification import classification
from hvd_train.tasks.task import Task

CLASSIFICATION = "classification"
_OTHERS: dict[str, Callable[[tuple[str, ...]], Task]] = {
    "regression": lambda classes: builtin.regression(),
    "multi-label": lambda classes: builtin.multi_label(),
    "segmentation": builtin.segmentation,
    "language-model": lambda classes: builtin.language_model(),
}


def check_name(name: str) -> None:
    """Raise UsageError if the task is unknown or cannot be imported."""
    if plugin.is_reference(name):
        plugin.load("task", name)
    elif name not in (known := (CLASSIFICATION, *_OTHERS)):
        raise unknown_name("task", name, known)


def open_task(config: Config, classes: tuple[str, ...], own: Task | None = None) -> Task:
    """Return `own` or the task of the config. Raises UsageError if the user's function returns something else."""
    name = config.model.task
    if own is not None:
        return own
    if name == CLASSIFICATION:
        return classification(config, classes)
    if name in _OTHERS:
        return _OTHERS[name](classes)
    task = plugin.load("task", name)(config)
    if not isinstance(task, Task):
        raise UsageError(f"--task {name}: it returned {type(task).__name__}, not an hvd_train.Task")
    return task
