"""The built-in tasks: equal on any number of ranks, resumed to the bit, and their
figures worked out by hand.
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvd_train import UsageError, train
from hvd_train.result import Result
from hvd_train.state import to_host
from hvd_train.tasks.builtin import open_task
from hvd_train.tasks.task import Measuring, Scores, Task, numbers_of
from hvd_train.validate import scores_of
from hvd_train.world.world import LocalWorld, World
from tests.support.runs import Weights, equal, largest_difference, small_config
from tests.support.worlds import own_generator, run_ranks

INPUTS = torch.rand(50, 4, generator=torch.Generator().manual_seed(0))


def words() -> tuple[Tensor, Tensor]:
    tokens = torch.arange(50 * 9).view(50, 9) % 13
    following = tokens[:, 1:].clone()
    following[::3, 5:] = -100
    return tokens[:, :-1], following


def masks() -> tuple[Tensor, Tensor]:
    images = torch.rand(50, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    classes = (images[:, 0] * 3).to(torch.uint8)
    classes[::4, :2] = 255
    return images, classes


CASES = {
    "regression": ((INPUTS, INPUTS.sum(1)), lambda: nn.Linear(4, 1)),
    "multi-label": ((INPUTS, (INPUTS[:, :3] > 0.5).float()), lambda: nn.Linear(4, 3)),
    "segmentation": (masks(), lambda: nn.Conv2d(1, 3, 3, padding=1)),
    "language-model": (words(), lambda: nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13))),
}


def trained(
    world: World, name: str, *, data: Any = None, task: Task | None = None, **settings: Any
) -> tuple[Result, Weights]:
    """Train the network of a case, on its tensors or other data, for its task or another one."""
    tensors, network = CASES[name]
    model = own_generator(network())
    data = data or [TensorDataset(*tensors)] * 2
    config = small_config(task=name, output_dir=Path(f"on-{world.place.size}"), **settings)
    result = train(config, model=lambda: model, data=lambda config: data, task=task, world=world)
    return result, to_host(model.state_dict())


@pytest.mark.parametrize("name", CASES)
def test_a_built_in_task_keeps_the_promises(name: str) -> None:
    """One and three ranks have equal weights to 1e-5, and the same scores."""
    alone, expected = trained(LocalWorld(), name, epochs=2)
    assert largest_difference(expected, own_generator(CASES[name][1]()).state_dict()) > 1e-2
    for result, weights in run_ranks(3, lambda world: trained(world, name, epochs=2)):
        assert largest_difference(weights, expected) <= 1e-5
        assert dict(result.scores) == pytest.approx(dict(alone.scores), abs=1e-4)


def imitation(teacher: nn.Module) -> Task:
    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": (model(batch[0]) - teacher(batch[0])).square().sum(1)}

    return Task(measure, constants=(teacher,))


def test_a_student_learns_from_a_teacher_as_well_on_any_number_of_ranks() -> None:
    """The teacher stays as it is."""
    teacher = own_generator(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), seed=5)
    before = to_host(teacher.state_dict())

    def student_of(world: World) -> Weights:
        own = copy.deepcopy(teacher)
        settings = {"task": imitation(own), "epochs": 30, "learning_rate": 0.1}
        _, weights = trained(world, "multi-label", **settings)
        assert equal(to_host(own.state_dict()), before)
        return weights

    student = student_of(LocalWorld())
    teacher_layer = {name.removeprefix("1."): value for name, value in before.items()}
    assert largest_difference(student, teacher_layer) < 0.1
    for other in run_ranks(3, student_of):
        assert largest_difference(other, student) <= 1e-5


def test_ranks_with_different_teachers_are_refused() -> None:
    def body(world: World) -> None:
        task = imitation(own_generator(nn.Linear(4, 3), seed=world.place.rank))
        with pytest.raises(UsageError, match="constant module 0"):
            trained(world, "multi-label", task=task)

    run_ranks(2, body)


def scores(name: str, output: Any, targets: Tensor, classes: tuple[str, ...] = ()) -> Scores:
    """Return the scores of a model whose output for these targets is this one."""
    task = open_task(small_config(task=name), classes)
    measuring = Measuring(task.measure)
    count = len(targets)
    measures = measuring(lambda inputs: output, (torch.zeros(count, 1), targets), count)  # type: ignore[arg-type]
    numbers = numbers_of(measures, measuring.fields, torch.float64)
    return scores_of(task, measuring.fields, numbers, count)


def test_figures_equal_values_worked_out_by_hand() -> None:
    for targets in (torch.tensor([0.0, 2.0]), torch.tensor([[0.0], [2.0]])):
        for output in (torch.tensor([[1.0], [5.0]]), torch.tensor([1.0, 5.0])):
            assert dict(scores("regression", output, targets)) == {"loss": 5.0, "error": 2.0}

    logits = torch.tensor([[9.0, -9], [9, 9], [-9, -9]])  # 3 marked, of them 2 right; 3 to be found
    found = scores("multi-label", logits, torch.tensor([[1, 0], [1, 0], [0, 1]]))
    assert (found["f1"], found["all_right"]) == (2 * 2 / 6, 1 / 3)

    logits = torch.zeros(1, 2, 1, 4)
    logits[0, 1, 0, 1:] = math.log(3.0)  # answers 0 1 1 1
    found = scores(
        "segmentation", {"out": logits}, torch.tensor([[[0, 0, 1, 255]]]), ("sky", "tree")
    )
    assert found["loss"] == pytest.approx((math.log(2) + math.log(4) + math.log(4 / 3)) / 3)
    assert (found["right"], found["mean_iou"], found.per_class) == (
        2 / 3,
        0.5,
        {"sky": 0.5, "tree": 0.5},
    )

    found = scores(
        "language-model", torch.zeros(2, 3, 7), torch.tensor([[1, 2, -100], [3, -100, -100]])
    )
    assert found["perplexity"] == pytest.approx(7.0)


def test_a_batch_of_another_form_is_refused() -> None:
    """It has a part more, is a dict, or has texts."""
    number = torch.zeros(2)
    for batch, found in (
        ((number,) * 3, "Tensor, Tensor, Tensor"),
        ({}, "dict"),
        ((number, ("a",)), "Tensor, tuple"),
    ):
        with pytest.raises(UsageError, match=rf"\({found}\): each item must be \(input, target\)"):
            open_task(small_config(task="regression"), ()).measure(nn.Identity(), batch)


def test_a_task_of_ones_own_may_be_a_function_of_the_config() -> None:
    task = open_task(
        small_config(task="mine"), (), lambda config: Task(len, best=config.model.task)
    )
    assert task.best == "mine"


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (lambda config: len, "returned builtin_function_or_method, not an hvd_train.Task"),
        (Task(nn.CrossEntropyLoss()), r"Task\(CrossEntropyLoss\(\)\): give a function measure"),
    ],
)
def test_an_own_task_of_a_wrong_type_is_one_line(own: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_task(small_config(), (), own)


@pytest.mark.parametrize(
    ("name", "part", "at", "value", "says"),
    [
        ("segmentation", 0, 0, 3, "3: .*the model has classes 0 to 2, and 255 means"),
        ("language-model", 0, 20, 13, "13: .*classes 0 to 12, and -100 means"),
        ("language-model", 1, 20, -1, "-1: --task language-model"),
        ("multi-label", 0, 20, 2.0, "2.0: .*targets are 0 or 1"),
        ("multi-label", 1, 20, math.nan, "nan: "),
    ],
)
def test_a_target_out_of_range_is_named(
    name: str, part: int, at: int, value: float, says: str
) -> None:
    """With its sample of the training or validation set, in the first two samples, which are
    measured before the first step, and in others.
    """
    inputs, targets = CASES[name][0]
    wrong = targets.clone()
    wrong[at].view(-1)[-1] = value
    data = [TensorDataset(inputs, targets)] * 2
    data[part] = TensorDataset(inputs, wrong)
    with pytest.raises(UsageError, match=f"sample {at} has the target {says}"):
        trained(LocalWorld(), name, data=data, epochs=1)


def test_an_input_beyond_the_vocabulary_is_named() -> None:
    inputs, following = words()
    inputs[20, 0] = 13
    says = "the model cannot take inputs with values of 0 to 13: index out of range"
    with pytest.raises(UsageError, match=says):
        trained(LocalWorld(), "language-model", data=(TensorDataset(inputs, following), None))
