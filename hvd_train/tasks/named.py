"""Tasks by name: classification, or the user's own."""

from hvd_train import plugin
from hvd_train.config import Config
from hvd_train.errors import UsageError, unknown_name
from hvd_train.tasks.classification import classification
from hvd_train.tasks.task import Task

CLASSIFICATION = "classification"


def check_name(name: str) -> None:
    """Raise UsageError if the task is unknown or cannot be imported."""
    if plugin.is_reference(name):
        plugin.load("task", name)
    elif name != CLASSIFICATION:
        raise unknown_name("task", name, [CLASSIFICATION])


def open_task(config: Config, classes: tuple[str, ...], own: Task | None = None) -> Task:
    """Return `own` or the task of the config. Raises UsageError if the user's function returns something else."""
    name = config.model.task
    if own is not None:
        return own
    if not plugin.is_reference(name):
        return classification(config, classes)
    task = plugin.load("task", name)(config)
    if not isinstance(task, Task):
        raise UsageError(f"--task {name}: it returned {type(task).__name__}, not an hvd_train.Task")
    return task
