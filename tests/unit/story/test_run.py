"""Trainings against loops of plain torch, and runs whose data or weights are others."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

from hvd_train.config import DataConfig
from hvd_train.data.dataset import Arrays, DataSet, MapDataset
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


def sgd(**settings: Any) -> Optimizer:
    defaults = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
    return lambda model: torch.optim.SGD(model.parameters(), **{**defaults, **settings})


def of_timm(name: str, **settings: float) -> Optimizer:
    import timm.optim

    return lambda model: getattr(timm.optim, name)(model.parameters(), **settings)


def adam(kind: Callable[..., torch.optim.Optimizer], decay: float) -> Optimizer:
    return lambda model: kind(model.parameters(), lr=0.003, weight_decay=decay)


SLOW = {"learning_rate": 0.003}
LARS = {"lr": 0.5, "momentum": 0.9, "weight_decay": 5e-4}
LAMB = {"lr": 0.01, "weight_decay": 5e-4}
CASES: dict[str, tuple[dict[str, Any], Optimizer, Loss]] = {
    "sgd": ({}, sgd(), plain),
    "nesterov": ({"nesterov": True}, sgd(nesterov=True), plain),
    "adam": ({"optimizer": "adam", **SLOW}, adam(torch.optim.Adam, 5e-4), plain),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.1, **SLOW},
        adam(torch.optim.AdamW, 0.1),
        plain,
    ),
    "another of torch": (
        {"optimizer": "torch.optim:RAdam", **SLOW},
        adam(torch.optim.RAdam, 5e-4),
        plain,
    ),
    "lars": ({"optimizer": "lars", "learning_rate": 0.5}, of_timm("Lars", **LARS), plain),
    "lamb": ({"optimizer": "lamb", "learning_rate": 0.01}, of_timm("Lamb", **LAMB), plain),
    "label smoothing": ({"label_smoothing": 0.1}, sgd(), smoothed),
    "mixup": ({"mixup": 0.7, "batch_size": GLOBAL_BATCH}, sgd(), mixed(v2.MixUp)),
    "cutmix": ({"cutmix": 0.7, "batch_size": GLOBAL_BATCH}, sgd(), mixed(v2.CutMix)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_equals_plain_torch(name: str) -> None:
    """Equal weights after two epochs to 1e-5, in passes of 4 images here and of 20 there."""
    settings, optimizer, loss = CASES[name]
    config = small_config(
        epochs=EPOCHS,
        augment="none",
        schedule="constant",
        warmup_epochs=0.0,
        **settings,
        output_dir=Path("run"),
    )
    _, weights = trained(LocalWorld(), config)
    model = own_generator(runs.convnet(10))
    expected = reference(model, optimizer(model), loss)
    assert largest_difference(weights, expected) <= TOLERANCE
    assert largest_difference(weights, own_generator(runs.convnet(10)).state_dict()) > 1e-3, (
        "nothing was trained"
    )


def reference(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Weights:
    few = runs.few_digits(small_config().data)
    images = (few.train.images.float() / 255 - few.mean[0]) / few.std[0]
    step = 0
    for epoch in range(EPOCHS):
        shuffled = torch.from_numpy(EpochOrder(0, epoch, runs.NUM_SAMPLES)[:])
        for batch in shuffled.split(GLOBAL_BATCH):
            optimizer.zero_grad()
            loss(model, images[batch], few.train.labels[batch], step).backward()
            optimizer.step()
            step += 1
    return copy.deepcopy(dict(model.state_dict()))


def digits(**changes: Any) -> Callable[[DataConfig], DataSet]:
    """Return a function for changed digits: all such functions have the same name in a config."""
    return lambda config: replace(runs.few_digits(config), **changes)


def without_first(count: int, part: Arrays | MapDataset | None) -> Arrays:
    return Arrays(part.images[count:], part.labels[count:], len(part) - count)


FEW = runs.few_digits(DataConfig())
FEWER = digits(train=without_first(1, FEW.train))


def test_changed_data_are_refused() -> None:
    trained(StoppingWorld(14), small_config(), data=digits())
    with pytest.raises(
        UsageError, match=r"189 images, the run had 190.*--resume never .*--weights FILE"
    ):
        trained(LocalWorld(), small_config(), data=FEWER)


def test_other_classes_are_named_by_all_that_read_the_run() -> None:
    other_classes = digits(classes=("zero", *"123456789"))
    trained(StoppingWorld(14), small_config(), data=digits())
    checkpoint = next(Path("run/checkpoints").iterdir())
    for target in (Path("run"), checkpoint):
        evaluate(target, model=runs.convnet, data=runs.few_digits)
        with pytest.raises(UsageError, match="class 0 is 'zero', the run had '0'"):
            evaluate(target, model=runs.convnet, data=other_classes)
    with pytest.raises(UsageError, match="class 0 is 'zero', the run had '0'"):
        trained(LocalWorld(), small_config(), data=other_classes)


def test_another_validation_set_is_reported_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    changed = digits(val=without_first(30, FEW.val))
    trained(StoppingWorld(14), small_config(), data=digits())
    evaluate(Path("run"), model=runs.convnet, data=changed)
    assert "the validation set has 30 images, the run had 60" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the validation set"):
        trained(LocalWorld(), small_config(), data=changed)


def test_ranks_with_different_data_are_refused() -> None:
    with pytest.raises(UsageError, match="the ranks differ in the data set"):
        run_ranks(
            2,
            lambda world: trained(world, small_config(), data=(digits(), FEWER)[world.place.rank]),
        )
    assert not Path("run").exists()


def drawn(seed: int) -> Callable[[object], tuple[TensorDataset, TensorDataset]]:
    """Return data that belong to a seed of their own."""

    def data(config: object) -> tuple[TensorDataset, TensorDataset]:
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x[:40], x[:40].sum(1)), TensorDataset(x[40:], x[40:].sum(1))

    return data


def test_data_that_are_drawn_anew_are_refused() -> None:
    """By other ranks, and when the run resumes."""

    def run(world: World, seed: int) -> None:
        train(
            small_config(),
            model=lambda: nn.Linear(4, 1),
            data=drawn(seed),
            task=regression(),
            world=world,
        )

    with pytest.raises(
        UsageError,
        match=r"the ranks differ in the items of the \w+ set: .* export PYTHONHASHSEED=0$",
    ):
        run_ranks(2, lambda world: run(world, world.place.rank))
    run(StoppingWorld(3), 0)
    with pytest.raises(
        UsageError, match=r"items of the training set differ from the run's .*--resume never"
    ):
        run(LocalWorld(), 1)
    run(LocalWorld(), 0)


def test_one_rank_of_a_launcher_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs neither MPI nor Horovod."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert type(connect()) is LocalWorld
