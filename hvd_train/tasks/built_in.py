"""The task of a run: one of ours by its name, made to suit the data, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_train import config_file, plugin, weights_file
from hvd_train.config import Config
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.trees import leaves, of_tensors
from hvd_train.errors import UsageError
from hvd_train.network import models, weights
from hvd_train.settings.arguments import arguments_in
from hvd_train.settings.task import TaskConfig
from hvd_train.tasks.classification import classification
from hvd_train.tasks.distillation import distillation
from hvd_train.tasks.language_model import language_model
from hvd_train.tasks.multi_label import multi_label
from hvd_train.tasks.regression import regression
from hvd_train.tasks.segmentation import segmentation
from hvd_train.tasks.task import Task

_MOST_CLASSES = 1 << 16
OwnTask = Task | Callable[..., Task]
"""A task, or a function of the user's that returns one for a data set and the arguments of --task-args."""


def is_of_classes(config: TaskConfig, own: OwnTask | None) -> bool:
    """Return whether the items of a task's data are images and the numbers of classes, and nothing else."""
    return own is None and config.is_of_image_classes


def check_name(config: TaskConfig) -> None:
    """Raise UsageError where the user's function that a config names cannot be had."""
    if plugin.is_reference(config.task):
        plugin.load("task", config.task, Task)


def open_task(config: Config, data: DataSet, own: OwnTask | None = None) -> Task:
    """Return the task of a run: `own`, what the user's function returns for the data, or the one that the config names.

    Raises UsageError where the arguments are not the task's, or where the data do not say what it needs.
    """
    name, arguments = config.task.task, arguments_in("task-args", config.task.task_args)
    if config.optimizer.label_smoothing and not is_of_classes(config.task, own):
        raise UsageError(f"--label-smoothing is for classes, not for --task {name}: type --label-smoothing 0")
    if isinstance(own, Task):
        if arguments:
            raise UsageError("--task-args are for a function that returns a task: this run was given the task itself")
        return own
    make: Any
    if own is not None or plugin.is_reference(name):
        make = own or plugin.load("task", name, Task)
        if isinstance(make, Task):
            return make
        try:
            inspect.signature(make).bind(data, **arguments)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--task {name}: it cannot be called with the data and --task-args: {error}") from None
        task = make(data, **arguments)
        if not isinstance(task, Task):
            raise UsageError(f"--task {name}: it returned {type(task).__name__}, not an hvd_train.Task")
        return task
    if name not in _BUILT_IN:
        raise UsageError(f"--task {name}: only the script that began this run knows its task; start that script")
    make, facts, known = _BUILT_IN[name](config, data, arguments)
    if unknown := arguments.keys() - known:
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise UsageError(f"--task-args {sorted(unknown)[0]}=...: {name} has no such argument; {takes}")
    try:
        task = make(**{**facts, **arguments})
    except (TypeError, ValueError) as error:
        raise UsageError(f"--task-args: {name} cannot take these: {error}") from None
    assert isinstance(task, Task)
    return task


Made = tuple[Callable[..., Task], dict[str, Any], set[str]]
"""The function that makes a task, what it is given of the config and the data, and the arguments it may be given."""


def _classification(config: Config, data: DataSet, arguments: dict[str, Any]) -> Made:
    if not data.classes:
        raise UsageError(
            f"--data {config.data.data} has no classes: type what the task is, as in --task regression or --task "
            "language-model"
        )
    return classification, {"classes": data.classes, "label_smoothing": config.optimizer.label_smoothing}, set()


def _regression(config: Config, data: DataSet, arguments: dict[str, Any]) -> Made:
    return regression, {"outputs": max(1, _first_target(data).numel())}, {"loss"}


def _segmentation(config: Config, data: DataSet, arguments: dict[str, Any]) -> Made:
    if not data.classes and "classes" not in arguments:
        raise UsageError("--task segmentation: the data have no `classes`; give their names, or --task-args classes=21")
    return segmentation, {"classes": _names(data.classes, arguments)}, {"classes"}


def _multi_label(config: Config, data: DataSet, arguments: dict[str, Any]) -> Made:
    number = _first_target(data).numel()
    return multi_label, {"classes": data.classes or tuple(map(str, range(number)))}, set()


def _language_model(config: Config, data: DataSet, arguments: dict[str, Any]) -> Made:
    if data.vocabulary is None and "vocabulary" not in arguments:
        raise UsageError("--task language-model: type how many tokens there are, as in --task-args vocabulary=50257")
    number = arguments.get("vocabulary", 1)
    if type(number) is not int or number < 1:
        raise UsageError(f"--task-args vocabulary={number}: it must be a number of tokens")
    return language_model, {"vocabulary": data.vocabulary}, {"vocabulary"}


def _distillation(config: Config, data: DataSet, arguments: dict[str, Any]) -> Made:
    name, file = arguments.pop("teacher", None), arguments.pop("teacher_weights", None)
    if not isinstance(name, str):
        raise UsageError(
            "--task distillation needs a teacher: type --task-args teacher=RUN, a run folder, or a model and its "
            "weights, as in teacher=resnet50 teacher_weights=DEFAULT"
        )
    facts = {
        "classes": data.classes,
        "label_smoothing": config.optimizer.label_smoothing,
        "teacher": _teacher(name, file, config, data),
    }
    return distillation, facts, {"teacher", "teacher_weights", "temperature", "weight"}


_BUILT_IN: dict[str, Callable[[Config, DataSet, dict[str, Any]], Made]] = {
    "classification": _classification,
    "regression": _regression,
    "segmentation": _segmentation,
    "multi-label": _multi_label,
    "language-model": _language_model,
    "distillation": _distillation,
}


def _teacher(name: str, file: Any, config: Config, data: DataSet) -> nn.Module:
    run = Path(name)
    if run.is_dir():
        best = weights_file.found_in(run, weights_file.BEST) or run / weights_file.BEST
        name, file = config_file.load(run / "config.yaml").model.model, str(best)
        if plugin.is_reference(name):
            raise UsageError(
                f"--task-args teacher={run}: that run names code as its model, which is not imported unasked; if you "
                f"trust it, type teacher={name} teacher_weights={file}"
            )
    if not isinstance(file, str):
        raise UsageError(f"--task-args teacher={name}: add teacher_weights=FILE, or DEFAULT for those of torchvision")
    models.check_name(name)
    weights.check(file, name)
    colour = data.channels == 3 or models.needs_colour(config.model.model)
    outputs = len(data.classes)
    teacher = models.build(name, num_outputs=outputs, channels=3 if colour else data.channels, seed=config.seed)
    fresh = teacher.state_dict()
    head = models.head_of(teacher)
    before = {key: value.clone() for key, value in fresh.items() if head is not None and key.startswith(f"{head}.")}
    weights.start_from(file, teacher, name, outputs)
    after = teacher.state_dict()
    if before and all(torch.equal(value, after[key]) for key, value in before.items()):
        raise UsageError(
            f"--task-args teacher={name}: its weights {file} are for other classes than the {outputs} of the data, so "
            "its last layer would be a random one; take a teacher that was trained on these classes"
        )
    return teacher


def _names(classes: tuple[str, ...], arguments: dict[str, Any]) -> tuple[str, ...]:
    number = arguments.pop("classes", None)
    if number is None:
        return classes
    if type(number) is not int or not 1 <= number <= _MOST_CLASSES:
        raise UsageError(f"--task-args classes={number}: it must be a number of classes, at most {_MOST_CLASSES:,}")
    return tuple(map(str, range(number)))


def _first_target(data: DataSet) -> Tensor:
    """Return the target of the first sample, of which there is one; of a tree its first tensor."""
    if isinstance(data.train, Arrays):
        return leaves(data.train.targets)[0][0]
    try:
        return leaves(of_tensors(data.train[0][1]))[0]
    except TypeError as error:
        raise UsageError(f"sample 0 of the data has a target of {error}, which is no tensor and no number") from None
