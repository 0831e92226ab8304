"""Small complete trainings of every task, on data in memory and item by item, with networks without kinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hvd_train import Config
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.trees import Tree, mapped
from hvd_train.network import small
from hvd_train.result import Result
from hvd_train.settings.data import DataConfig
from hvd_train.world.world import LocalWorld, Request, World
from tests.support.runs import Weights, small_config, trained
from tests.support.worlds import Killed, own_generator, run_ranks

T = TypeVar("T")

NUM_TRAIN, NUM_VAL = 38, 17
WIDTH, CLASSES, VOCABULARY, LENGTH, SIDE = 6, 4, 7, 5, 6
CLASS_NAMES = ("a", "b", "c", "d")


class Items:
    """Rows of two trees as a map-style data set; a tensor without dimensions is a target as well."""

    def __init__(self, inputs: Tree, targets: Tree, count: int, classes: tuple[str, ...]) -> None:
        self.inputs, self.targets, self.count, self.classes = inputs, targets, count, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tree, Tree]:
        inputs, targets = (mapped(lambda tensor: tensor[index], tree) for tree in (self.inputs, self.targets))
        return inputs, targets


def smooth_table(outputs: int) -> nn.Module:
    """Return a network for rows of `WIDTH` numbers."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, outputs))


def smooth_pixels(outputs: int) -> nn.Module:
    """Return a network for images [n, 1, h, w] that keeps their size."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, outputs, 3, padding=1))


def smooth_text(outputs: int) -> nn.Module:
    """Return a network for tokens [n, length], which sees each token by itself."""
    return nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def _table(*targets_of: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    """Return what draws rows, and of each as many numbers that depend on it."""

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randn(count, WIDTH, generator=generator)
        matrix = torch.linspace(-9, 9, WIDTH * math.prod(targets_of)).cos().view(WIDTH, -1)
        numbers = torch.tanh(rows @ matrix) + 0.3 * torch.randn(count, matrix.shape[1], generator=generator)
        return rows, numbers.view(count, *targets_of)

    return draw


def _classes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rows, numbers = _table(CLASSES)(count, generator)
    return rows, numbers.argmax(1)


def _labels(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rows, numbers = _table(CLASSES)(count, generator)
    return rows, (numbers > 0.3).to(torch.uint8)


def _pixels(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    classes = (images[:, 0] * 1.5).round().clamp(0, CLASSES - 1).to(torch.uint8)
    classes[torch.rand(classes.shape, generator=generator) < 0.1] = 255
    return images, classes


def _text(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 3) % VOCABULARY
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class Case:
    """A task as a run names it, with what goes with it."""

    task: str
    draw: Callable[[int, torch.Generator], tuple[Tree, Tree]]
    model: Callable[[int], nn.Module]
    arguments: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    def data(self, *, items: bool) -> Callable[[DataConfig], DataSet]:
        """Return the function of a user's that makes the data: read item by item, or in memory."""
        generator = torch.Generator().manual_seed(3)
        parts = [(*self.draw(count, generator), count) for count in (NUM_TRAIN, NUM_VAL)]
        train, val = ((Items(*part, self.classes) if items else Arrays(*part)) for part in parts)
        vocabulary = VOCABULARY if self.task == "language-model" else None
        return lambda config: DataSet(train, val, self.classes, channels=WIDTH, vocabulary=vocabulary)

    def config(self, **changes: Any) -> Config:
        """Return a config of two epochs of four steps, the last of them smaller; slots do not divide over ranks."""
        base = {"task": self.task, "task_args": self.arguments, "epochs": 2, "global_batch_size": 12}
        return small_config(**{**base, "eval_batch_size": 5, **changes})

    def trained(self, world: World, folder: str, *, items: bool = False, **changes: Any) -> tuple[Result, Weights]:
        """Train in `world`, and return the result and the final weights on this rank."""
        return trained(world, self.config(output_dir=Path(folder), **changes), self.model, self.data(items=items))


def teacher_weights() -> Path:
    """Write the weights of a teacher into the current folder."""
    torch.save(own_generator(small.TableNetwork(CLASSES, WIDTH), seed=9).state_dict(), "teacher.pt")
    return Path("teacher.pt")


CASES = {
    "classification": Case("classification", _classes, smooth_table, classes=CLASS_NAMES),
    "multi-label": Case("multi-label", _labels, smooth_table, classes=CLASS_NAMES),
    "regression of a number": Case("regression", _table(), smooth_table),
    "regression of three": Case("regression", _table(3), smooth_table, ("loss=huber",)),
    "segmentation": Case("segmentation", _pixels, smooth_pixels, classes=CLASS_NAMES),
    "language-model": Case("language-model", _text, smooth_text),
    "distillation": Case(
        "distillation",
        _classes,
        smooth_table,
        ("teacher=table-network", "teacher_weights=teacher.pt", "temperature=2"),
        CLASS_NAMES,
    ),
}
"""The built-in tasks; that of distillation needs `teacher_weights` in the current folder."""


class StopsAfter(LocalWorld):
    """The world of one in which the job asks its ranks to stop after so many steps of this life."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    @override
    def requested(self, *, told_to_end: bool = False) -> Request:
        self._left -= 1
        return "stop" if self._left == 0 else "train"


def on_ranks(size: int, body: Callable[[World], T]) -> list[T]:
    """Return what `body` returns on each of so many ranks, which are threads."""
    results = run_ranks(size, body)
    return [result for result in results if not isinstance(result, Killed)]
