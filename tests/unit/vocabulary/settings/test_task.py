"""The settings of a task."""

from __future__ import annotations

import pytest

from hvd_train.errors import UsageError
from hvd_train.settings.task import TASKS, TaskConfig


def test_tasks_are_known_by_name_in_capitals_or_not() -> None:
    """And another one with the nearest of those that are."""
    assert [TaskConfig(task=name.upper()).task for name in TASKS] == [*TASKS]
    assert TaskConfig(task="mine:task").task == "mine:task"
    with pytest.raises(UsageError, match="did you mean 'segmentation'"):
        TaskConfig(task="segmentaton")


def test_arguments_are_pairs() -> None:
    """What is none says how to write one."""
    with pytest.raises(UsageError, match=r"--task-args temperature: it must be name=value"):
        TaskConfig(task_args=("temperature",))


def test_images_can_stand_in_for_images_of_classes_only() -> None:
    """Measurements of speed take random images in their place."""
    assert [name for name in TASKS if TaskConfig(task=name).is_of_image_classes] == ["classification", "distillation"]
