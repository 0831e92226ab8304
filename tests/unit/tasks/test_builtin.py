"""The built-in tasks: equal on any number of ranks, resumed to the bit, and their
figures worked out by hand.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvd_train import UsageError, train
from hvd_train.state import to_host
from hvd_train.tasks.builtin import open_task
from hvd_train.tasks.task import Measuring, Scores, Task, numbers_of
from hvd_train.validate import scores_of
from hvd_train.world.world import LocalWorld, World
from tests.support.runs import Weights, equal, largest_difference, small_config
from tests.support.worlds import own_generator, run_ranks


def made(
    targets: Callable[[Tensor], Tensor], *shape: int
) -> Callable[[Any], tuple[TensorDataset, TensorDataset]]:
    inputs = torch.rand(50, *shape, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, targets(inputs))
    return lambda config: (data, data)


def words(_: Any) -> tuple[TensorDataset, TensorDataset]:
    tokens = torch.arange(50 * 9).view(50, 9) % 13
    following = tokens[:, 1:].clone()
    following[::3, 5:] = -100
    data = TensorDataset(tokens[:, :-1], following)
    return data, data


def masks(images: Tensor) -> Tensor:
    classes = (images[:, 0] * 3).long()
    classes[::4, :2] = 255
    return classes.to(torch.uint8)


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[], nn.Module]]] = {
    "regression": (made(lambda x: x.sum(1), 4), lambda: nn.Linear(4, 1)),
    "multi-label": (made(lambda x: (x[:, :3] > 0.5).float(), 4), lambda: nn.Linear(4, 3)),
    "segmentation": (made(masks, 1, 6, 6), lambda: nn.Conv2d(1, 3, 3, padding=1)),
    "language-model": (words, lambda: nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_built_in_task_keeps_the_promises(name: str) -> None:
    """One and three ranks have equal weights to 1e-5, and the same scores."""
    data, network = CASES[name]
    config = small_config(epochs=2, task=name)

    def train_in(world: World, folder: str) -> tuple[Any, Weights]:
        model = own_generator(network())
        result = train(
            config.replace(output_dir=Path(folder)), model=lambda: model, data=data, world=world
        )
        return result, to_host(model.state_dict())

    alone, expected = train_in(LocalWorld(), "alone")
    assert largest_difference(expected, own_generator(network()).state_dict()) > 1e-2
    for result, weights in run_ranks(3, lambda world: train_in(world, "three")):
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
        model = own_generator(nn.Linear(4, 3))
        config = small_config(
            epochs=30, learning_rate=0.1, output_dir=Path(f"on-{world.place.size}")
        )
        task = imitation(copy.deepcopy(teacher))
        train(config, model=lambda: model, data=CASES["regression"][0], task=task, world=world)
        return to_host(model.state_dict())

    student = student_of(LocalWorld())
    teacher_layer = {name.removeprefix("1."): value for name, value in before.items()}
    assert largest_difference(student, teacher_layer) < 0.1
    assert equal(to_host(teacher.state_dict()), before)
    for other in run_ranks(3, student_of):
        assert largest_difference(other, student) <= 1e-5


def test_ranks_with_different_teachers_are_refused() -> None:
    def body(world: World) -> None:
        task = imitation(own_generator(nn.Linear(4, 3), seed=world.place.rank))
        data, network = CASES["regression"]
        with pytest.raises(UsageError, match="constant module 0"):
            train(small_config(), model=network, data=data, task=task, world=world)

    run_ranks(2, body)


class Answers(nn.Module):
    """Returns the same output for each batch."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, inputs: Tensor) -> Any:
        return self.output


def scores(name: str, output: Any, targets: Tensor, classes: tuple[str, ...] = ()) -> Scores:
    task = open_task(small_config(task=name), classes)
    batch = torch.zeros(len(targets), 1), targets
    measuring = Measuring(task.measure)
    measures = measuring(Answers(output), batch, len(targets))
    return scores_of(
        task, measuring.fields, numbers_of(measures, measuring.fields, torch.float64), len(targets)
    )


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


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_another_form_is_refused(name: str) -> None:
    """It has a part more, is a dict, or has texts."""
    number = torch.zeros(2)
    for batch, found in (
        ((number,) * 3, "Tensor, Tensor, Tensor"),
        ({}, "dict"),
        ((number, ("a",)), "Tensor, tuple"),
    ):
        with pytest.raises(UsageError, match=rf"\({found}\): each item must be \(input, target\)"):
            open_task(small_config(task=name), ()).measure(nn.Identity(), batch)


def test_a_task_of_ones_own_may_be_a_function_of_the_config() -> None:
    mine = Task(lambda model, batch: {}, best="loss")
    config = small_config()
    assert open_task(config, (), mine) is mine
    given = []
    assert open_task(config, (), lambda config: given.append(config) or mine) is mine
    assert given == [config]


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


def with_wrong(
    name: str, part: int, at: int, value: float
) -> Callable[[Any], tuple[TensorDataset, TensorDataset]]:
    """Return the data of a case with a target that is `value` in one sample of the
    training or validation set.
    """

    def data(config: Any) -> tuple[TensorDataset, TensorDataset]:
        parts = [copy.deepcopy(each) for each in CASES[name][0](config)]
        targets = parts[part].tensors[1].float() if math.isnan(value) else parts[part].tensors[1]
        targets = targets.long() if value < 0 and name == "segmentation" else targets
        targets[(at, *[1] * (targets.ndim - 1))] = value
        parts[part].tensors = (parts[part].tensors[0], targets)
        return parts[0], parts[1]

    return data


@pytest.mark.parametrize(
    ("name", "value", "says", "part", "at"),
    [
        ("segmentation", 3, "3: .*the model has classes 0 to 2, and 255 means", 0, 0),
        ("segmentation", -100, "-100: --task segmentation", 1, 20),
        ("language-model", 13, "13: .*classes 0 to 12, and -100 means", 0, 20),
        ("language-model", -1, "-1: ", 1, 20),
        ("multi-label", 2.0, "2.0: .*targets are 0 or 1", 0, 20),
        ("multi-label", math.nan, "nan: ", 1, 20),
    ],
)
def test_a_target_out_of_range_is_named(
    name: str, value: float, says: str, part: int, at: int
) -> None:
    """With its sample, in the first two samples, which are measured before the
    first step, and in others.
    """
    network = CASES[name][1]
    config = small_config(task=name, epochs=1)
    with pytest.raises(UsageError, match=f"sample {at} has the target {says}"):
        train(config, model=network, data=with_wrong(name, part, at, value), world=LocalWorld())


def test_an_input_beyond_the_vocabulary_is_named() -> None:
    def data(config: Any) -> tuple[TensorDataset, None]:
        inputs, following = (tensor.clone() for tensor in words(config)[0].tensors)
        inputs[20, 0] = 13
        return TensorDataset(inputs, following), None

    with pytest.raises(
        UsageError, match="the model cannot take inputs with values of 0 to 13: index out of range"
    ):
        train(
            small_config(task="language-model"),
            model=CASES["language-model"][1],
            data=data,
            world=LocalWorld(),
        )
