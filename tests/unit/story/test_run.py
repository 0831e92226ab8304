"""Trainings against loops of plain torch, and runs whose data or weights are others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

from hvd_train.config import DataConfig
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.errors import UsageError
from hvd_train.progress.order import EpochOrder, key
from hvd_train.run import connect, evaluate, train
from hvd_train.tasks.builtin import regression
from hvd_train.world.world import LocalWorld, World
from tests.support import runs
from tests.support.runs import Weights, largest_difference, small_config, trained
from tests.support.worlds import StoppingWorld, own_generator, run_ranks

TOLERANCE = 1e-5
EPOCHS = 2
GLOBAL_BATCH = 20

Loss = Callable[[nn.Module, Tensor, Tensor, int], Tensor]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def plain(model: nn.Module, images: Tensor, targets: Tensor, step: int) -> Tensor:
    return F.cross_entropy(model(images), targets)


def smoothed(model: nn.Module, images: Tensor, targets: Tensor, step: int) -> Tensor:
    shares = 0.9 * F.one_hot(targets, 10) + 0.01
    return -(shares * model(images).log_softmax(1)).sum(1).mean()


def mixed(kind: Callable[..., nn.Module]) -> Loss:
    """Mix the whole batch with torchvision and the random numbers of
    the step's only micro-batch.
    """

    def loss(model: nn.Module, images: Tensor, targets: Tensor, step: int) -> Tensor:
        torch.manual_seed(key(0, 3, step, 0))
        images, shares = kind(alpha=0.7, num_classes=10)(images, targets)
        return F.cross_entropy(model(images), shares)

    return loss


def of(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Optimizer:
    return lambda model: kind(model.parameters(), **settings)


MOMENTUM = {"momentum": 0.9, "weight_decay": 5e-4}
ADAM = {"lr": 0.003, "weight_decay": 5e-4}
SGD = of(torch.optim.SGD, lr=0.05, **MOMENTUM)
CASES = {
    "sgd": ({}, SGD, plain),
    "nesterov": (
        {"nesterov": True},
        of(torch.optim.SGD, lr=0.05, nesterov=True, **MOMENTUM),
        plain,
    ),
    "adam": ({"optimizer": "adam"}, of(torch.optim.Adam, **ADAM), plain),
    "adamw": ({"optimizer": "adamw"}, of(torch.optim.AdamW, lr=0.003, weight_decay=0.1), plain),
    "another of torch": ({"optimizer": "torch.optim:RAdam"}, of(torch.optim.RAdam, **ADAM), plain),
    "lars": ({"optimizer": "lars"}, of(timm.optim.Lars, lr=0.5, **MOMENTUM), plain),
    "lamb": ({"optimizer": "lamb"}, of(timm.optim.Lamb, lr=0.01, weight_decay=5e-4), plain),
    "label smoothing": ({"label_smoothing": 0.1}, SGD, smoothed),
    "mixup": ({"mixup": 0.7, "batch_size": GLOBAL_BATCH}, SGD, mixed(v2.MixUp)),
    "cutmix": ({"cutmix": 0.7, "batch_size": GLOBAL_BATCH}, SGD, mixed(v2.CutMix)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_equals_plain_torch(name: str) -> None:
    """Equal weights after two epochs to 1e-5, in passes of 4 images here and of 20 there."""
    settings, optimizer_of, loss = CASES[name]
    model = own_generator(runs.convnet(10))
    optimizer = optimizer_of(model)
    config = small_config(
        epochs=EPOCHS,
        augment="none",
        schedule="constant",
        warmup_epochs=0.0,
        learning_rate=optimizer.defaults["lr"],
        weight_decay=optimizer.defaults["weight_decay"],
        **settings,
    )
    _, weights = trained(LocalWorld(), config)
    expected = reference(model, optimizer, loss)
    assert largest_difference(weights, expected) <= TOLERANCE
    assert largest_difference(weights, own_generator(runs.convnet(10)).state_dict()) > 1e-3, (
        "nothing was trained"
    )


def reference(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Weights:
    few = runs.few_digits(small_config().data)
    images = (few.train.images.float() / 255 - few.mean[0]) / few.std[0]
    orders = [EpochOrder(0, epoch, runs.NUM_SAMPLES)[:] for epoch in range(EPOCHS)]
    batches = [batch for order in orders for batch in torch.from_numpy(order).split(GLOBAL_BATCH)]
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss(model, images[batch], few.train.labels[batch], step).backward()
        optimizer.step()
    return model.state_dict()


def digits(**changes: Any) -> Callable[[DataConfig], DataSet]:
    """Return a function for changed digits: all such functions have the same name in a config."""
    return lambda config: replace(runs.few_digits(config), **changes)


def without_first(count: int, part: Any) -> Arrays:
    return Arrays(part.images[count:], part.labels[count:], len(part) - count)


FEW = runs.few_digits(DataConfig())
FEWER = digits(train=without_first(1, FEW.train))
OTHER_CLASSES = digits(classes=("zero", *"123456789"))
OTHER_VAL = digits(val=without_first(30, FEW.val))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (FEWER, r"189 images, the run had 190.*--resume never .*--weights FILE"),
        (OTHER_CLASSES, "class 0 is 'zero', the run had '0'"),
        (OTHER_VAL, "the validation set has 30 images, the run had 60"),
    ],
)
def test_changed_data_are_refused(data: Any, says: str) -> None:
    trained(StoppingWorld(14), small_config(), data=digits())
    with pytest.raises(UsageError, match=says):
        trained(LocalWorld(), small_config(), data=data)


def test_an_evaluation_refuses_other_classes_and_reports_another_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained(StoppingWorld(14), small_config(), data=digits())
    for target in (Path("run"), *Path("run/checkpoints").iterdir()):
        evaluate(target, model=runs.convnet, data=OTHER_VAL)
        assert "the validation set has 30 images, the run had 60" in capsys.readouterr().err
        with pytest.raises(UsageError, match="class 0 is 'zero', the run had '0'"):
            evaluate(target, model=runs.convnet, data=OTHER_CLASSES)


def test_ranks_with_different_data_are_refused() -> None:
    data = digits(), FEWER
    with pytest.raises(UsageError, match="the ranks differ in the data set"):
        run_ranks(2, lambda world: trained(world, small_config(), data=data[world.place.rank]))
    assert not Path("run").exists()


def test_data_that_are_drawn_anew_are_refused() -> None:
    """By other ranks, and when the run resumes."""

    def run(world: World, seed: int) -> None:
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed))
        data = TensorDataset(x[:40], x[:40].sum(1)), TensorDataset(x[40:], x[40:].sum(1))
        train(
            small_config(),
            model=lambda: nn.Linear(4, 1),
            data=lambda _: data,
            task=regression(),
            world=world,
        )

    says = r"the ranks differ in the items of the \w+ set: .* export PYTHONHASHSEED=0$"
    with pytest.raises(UsageError, match=says):
        run_ranks(2, lambda world: run(world, world.place.rank))
    run(StoppingWorld(3), 0)
    says = r"items of the training set differ from the run's .*--resume never"
    with pytest.raises(UsageError, match=says):
        run(LocalWorld(), 1)


def test_one_rank_of_a_launcher_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs neither MPI nor Horovod."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert type(connect()) is LocalWorld
