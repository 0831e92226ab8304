"""What the model is trained for."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_train.plugin import OWN
from hvd_train.settings.arguments import arguments_in
from hvd_train.settings.fields import to_known_name

TASKS = ("classification", "multi-label", "regression", "segmentation", "language-model", "distillation")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the model is trained for."""

    task: str = "classification"
    """What the model is trained for: classification, multi-label, regression, segmentation, language-model,
    distillation; or your own package.module:function, which is given the data set and returns an `hvd_train.Task`."""
    task_args: tuple[str, ...] = ()
    """Arguments for the task, as in --task-args teacher=resnet50 temperature=4."""

    @property
    def evaluated_as(self) -> TaskConfig:
        """The task that evaluates what this one trains: a student is scored as any classifier, without its teacher."""
        return TaskConfig() if self.task == "distillation" else self

    @property
    def is_of_image_classes(self) -> bool:
        """Whether samples are images and their targets the numbers of classes, and nothing else."""
        return self.task in ("classification", "distillation")

    def __post_init__(self) -> None:
        to_known_name(self, "task", (*TASKS, OWN))
        arguments_in("task-args", self.task_args)
